"""Prompts and the answers that a stack without faults gives to them.

Lengths lie at block borders, short and long; many prompts share whole blocks and a little more or less. A prompt whose
greedy answer has a near tie is left out: rounding could decide it otherwise in another batch.
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from loadtest import http_stream
from loadtest.cannot_run import CannotRun
from loadtest.http_stream import Address

BLOCK = 16  # token positions, the default of the workers
CLEAR = 2e-4  # the least lead of a chosen token's logprob over the next best
_BLOCKS_OF_PROMPTS = (1, 2, 3, 4, 6, 8, 12, 20, 32)
_ANSWER_LENGTHS = (1, 2, 8, 16, 17, 24, 32, 48, 96, 200)
_BORDERS = (-1, 0, 1)
_FAMILIES, _SHARING = 12, 0.6  # stems of prompts, and how many of the prompts begin with one
_LOWEST_ID, _HIGHEST_ID = 10, 4000
_AT_ONCE = 6
_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, and the answer of a stack without faults: its text, and the text of each of its tokens."""

    prompt: tuple[int, ...]
    text: str
    tokens: tuple[str, ...]

    def body(self, n: int, stream: bool, logprobs: bool, model: str) -> bytes:
        """Builds a greedy request whose answer has exactly as many tokens as are known."""
        wanted: dict[str, object] = {"model": model, "prompt": self.prompt, "max_tokens": len(self.tokens)}
        wanted |= {"temperature": 0, "ignore_eos": True, "n": n, "stream": stream}
        return orjson.dumps(wanted | ({"logprobs": 1} if logprobs else {}))


async def cases(address: Address, model: str, seed: int, number: int) -> list[Case]:
    """Asks a stack without faults for the answers to so many prompts of this seed. Raises HttpError, CannotRun."""
    asked = prompts(seed)
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(prompt: tuple[int, ...], num_tokens: int) -> Case | None:
        async with places:
            return await _answered(address, model, prompt, num_tokens)

    found: list[Case] = []
    for _ in range(20):
        answers = await asyncio.gather(*[one(*next(asked)) for _ in range(number - len(found))])
        found += [case for case in answers if case is not None]
        if len(found) == number:
            return found
    raise CannotRun(f"{len(found)} of {number} prompts had answers without near ties")


def prompts(seed: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Draws prompts for ever, each with the length of its answer; the same for the same seed."""
    chance = random.Random(f"prompts {seed}")
    stems = [_ids(chance, BLOCK * chance.choice((2, 4, 8)) + chance.choice(_BORDERS)) for _ in range(_FAMILIES)]
    while True:
        length = max(1, BLOCK * chance.choice(_BLOCKS_OF_PROMPTS) + chance.choice(_BORDERS))
        stem = chance.choice(stems) if chance.random() < _SHARING else ()
        prompt = (*stem, *_ids(chance, length))[: max(length, len(stem) + 1)]
        yield prompt, chance.choice(_ANSWER_LENGTHS)


def _ids(chance: random.Random, number: int) -> tuple[int, ...]:
    return tuple(chance.choices(range(_LOWEST_ID, _HIGHEST_ID), k=number))


async def _answered(address: Address, model: str, prompt: tuple[int, ...], num_tokens: int) -> Case | None:
    """Asks for one answer; None where it has a near tie."""
    wanted = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    async with asyncio.timeout(_ANSWER_S):
        answer = await http_stream.ask(address, "/v1/completions", orjson.dumps(wanted | {"logprobs": 2}))
    (choice,) = orjson.loads(answer.body())["choices"]
    logprobs = choice["logprobs"]
    if not all(is_clear(tops) for tops in logprobs["top_logprobs"]):
        return None
    return Case(prompt, choice["text"], tuple(logprobs["tokens"]))


def is_clear(tops: dict[str, float]) -> bool:
    """True for a position whose best token leads; two tokens that read the same cannot be told apart."""
    best = sorted(tops.values(), reverse=True)
    return len(best) > 1 and best[0] - best[1] > CLEAR
