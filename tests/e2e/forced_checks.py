"""What must hold of every shape whose requests are handed off: checks of a stack against `transformers`.

Greedy answers are those of `transformers`, token for token; of every token, also a drawn one or one of a prompt, the
log-probability is within 1e-4.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from tests.e2e.conftest import clear_prompt, generate, oracle, prompt_of
from tests.e2e.forced_stack import BLOCK, CHUNK, NUM_BLOCKS, ForcedStack
from tests.e2e.test_pair import num_handed_off, until_handed_off

WITHIN = 1e-4  # of log-probabilities
_TILES = (32, 64)  # tokens; at multiples of these the kernels of attention go on to another tile
_SHORT, _LONG = 10, 110  # tokens of an answer
_KILLED_AFTER = 20  # tokens


def check_greedy(forced: ForcedStack) -> None:
    """Prompts as long as blocks, chunks, tiles and windows, and one token more or less; all at once."""
    lengths = _border_lengths(forced)
    prompts = [clear_prompt(forced.model, length, length, _SHORT) for length in lengths]
    for prompt, choice in zip(prompts, _answers(forced, prompts, _SHORT), strict=True):
        _assert_right(forced, prompt, choice, _SHORT)


def check_choices(forced: ForcedStack) -> None:
    """Three greedy choices are one answer three times; drawn ones have the log-probabilities of their tokens."""
    prompt = clear_prompt(forced.model, 301, 2 * CHUNK + 1, _SHORT)
    for choice in until_handed_off(forced.gateway, 1, lambda: _complete(forced, prompt, _SHORT, n=3)).choices:
        _assert_right(forced, prompt, choice, _SHORT)
    drawn = until_handed_off(
        forced.gateway, 1, lambda: _complete(forced, prompt, _SHORT, n=3, temperature=1.0, seed=5)
    ).choices
    assert len({tuple(choice.token_ids) for choice in drawn}) > 1, "choices that are drawn alike prove little"
    for choice in drawn:
        scores = _scores(forced, prompt + choice.token_ids)[len(prompt) - 1 :]
        expected = scores[torch.arange(_SHORT), torch.tensor(choice.token_ids)]
        assert choice.logprobs.token_logprobs == pytest.approx(expected.tolist(), abs=WITHIN)


def check_prompt_logprobs(forced: ForcedStack) -> None:
    """Of each token of a prompt that is computed in chunks: its own log-probability and the highest ones."""
    prompt = clear_prompt(forced.model, 401, 2 * CHUNK + 3, _SHORT)
    (choice,) = until_handed_off(
        forced.gateway, 1, lambda: _complete(forced, prompt, _SHORT, prompt_logprobs=2)
    ).choices
    _assert_right(forced, prompt, choice, _SHORT)
    assert choice.prompt_logprobs[0] is None
    expected = _scores(forced, prompt)
    for told, token, logprobs in zip(choice.prompt_logprobs[1:], prompt[1:], expected, strict=True):
        assert told[str(token)]["logprob"] == pytest.approx(float(logprobs[token]), abs=WITHIN)
        highest = sorted((entry["logprob"] for entry in told.values()), reverse=True)[:2]
        assert highest == pytest.approx(logprobs.topk(2).values.tolist(), abs=WITHIN)


def check_prefix_hits(forced: ForcedStack) -> None:
    """A second prompt that begins as the first does: its whole blocks are cached, and move no more."""
    gateway, length = forced.gateway, 5 * BLOCK + 3
    whole = (length - 1) // BLOCK * BLOCK
    # A stalled machine may have the gateway choose the other decode worker, or need the blocks for another attempt.
    for attempt in range(4):
        first = prompt_of(500 + attempt, length)
        second = clear_prompt_after(forced, first[:-1], 7)
        before = gateway.moved_bytes()
        until_handed_off(gateway, 1, partial(_complete, forced, first, _SHORT))
        of_first = gateway.moved_bytes() - before
        answer = until_handed_off(gateway, 1, partial(_complete, forced, second, _SHORT))
        of_second = gateway.moved_bytes() - before - of_first
        _assert_right(forced, second, answer.choices[0], _SHORT)
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached in (0, whole), f"{cached} tokens are cached"
        assert of_first % forced.layout.block_bytes == of_second % forced.layout.block_bytes == 0
        if cached == whole and 0 < of_second < of_first:
            return
    raise AssertionError(f"of the second prompt {cached} tokens are cached, {of_second} bytes moved; {of_first} before")


def check_preemption(forced: ForcedStack) -> None:
    """More sequences than decode workers have room for: some are preempted, and computed again from their tokens."""
    room, shortest = 2 * NUM_BLOCKS * forced.layout.num_slices, 3 * BLOCK
    number = max(8, math.ceil(1.5 * room / forced.fewest_slices(shortest + _LONG)))
    prompts = [clear_prompt(forced.model, 600 + index, shortest + index, _LONG) for index in range(number)]
    before = list[float]()  # each time that they are asked for

    def note() -> None:
        before.append(_computed_by_decode(forced))

    for prompt, choice in zip(prompts, _answers(forced, prompts, _LONG, note), strict=True):
        _assert_right(forced, prompt, choice, _LONG)
    if forced.config.window is None:  # where all layers slide, sequences free what lies behind their windows
        needed = len(prompts) * (_LONG - 1)  # a token each; the first came from prefill
        assert _computed_by_decode(forced) - before[-1] > needed, "no sequence is computed again"


def check_handoffs(forced: ForcedStack) -> None:
    """Handoffs do not fail, so that nobody tries again; one in twenty may, where the machine stalls for seconds."""
    completed = num_handed_off(forced.gateway)
    failed = forced.gateway.metric("baton_handoff_failures_total")
    assert completed > 20
    assert failed <= completed / 20, f"{failed} of {failed + completed} handoffs failed"


def check_killed_decode_worker(forced: ForcedStack) -> None:
    """The decode worker of a stream is killed in its middle: the other one continues, and nobody notices. It is not
    started again.
    """
    stack, gateway = forced.stack, forced.gateway
    prompt = clear_prompt(forced.model, 701, 4 * BLOCK + 1, _LONG)
    for _ in range(5):
        stream = _complete(forced, prompt, _LONG, stream=True)
        tokens, logprobs = list[int](), list[float]()
        for chunk in stream:
            for choice in chunk.choices:
                tokens += choice.token_ids or []
                logprobs += choice.logprobs.token_logprobs if choice.logprobs is not None else []
            if len(tokens) >= _KILLED_AFTER and all(worker.running for worker in stack.workers.values()):
                _kill_decode_worker(forced)
        was_killed = not all(worker.running for worker in stack.workers.values())
        expected = generate(forced.model, prompt, _LONG)
        assert tokens == expected.tokens
        assert logprobs == pytest.approx(expected.logprobs, abs=WITHIN)
        gateway.wait_for_baseline()
        if was_killed:
            return
    raise AssertionError("answers were over, five times, before their worker was known")


# The last one leaves a worker less.
CHECKS: dict[str, Callable[[ForcedStack], None]] = {
    "greedy": check_greedy,
    "choices": check_choices,
    "prompt logprobs": check_prompt_logprobs,
    "prefix hits": check_prefix_hits,
    "preemption": check_preemption,
    "handoffs": check_handoffs,
    "killed decode worker": check_killed_decode_worker,
}


def clear_prompt_after(forced: ForcedStack, prefix: list[int], more: int) -> list[int]:
    """A prompt that begins so, goes on with so many tokens, and whose answer has no near tie."""
    for seed in range(20):
        prompt = prefix + prompt_of(1000 + seed, more)
        if generate(forced.model, prompt, _SHORT).clearness > 2 * WITHIN:
            return prompt
    raise AssertionError("no clear prompt among twenty")


def _border_lengths(forced: ForcedStack) -> list[int]:
    """1, and the borders of blocks, chunks, tiles and windows, each with its neighbours; also where a chunk or an
    answer leaves a window.
    """
    borders = [BLOCK, 2 * BLOCK, CHUNK, 3 * CHUNK, *_TILES]
    for window in forced.windows:
        borders += [window, window + CHUNK, -(-window // BLOCK) * BLOCK, window - _SHORT // 2]
    longest = NUM_BLOCKS * BLOCK - _SHORT
    found = {border + step for border in borders for step in (-1, 0, 1) if 0 < border + step <= longest}
    return sorted(found | {1})


def _complete(forced: ForcedStack, prompt: list[int], num_tokens: int, **fields: Any) -> Any:
    """An answer with the log-probability of each token; greedy unless it is told otherwise."""
    known = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "logprobs": 1}
    named = {key: fields.pop(key) for key in ("n", "temperature", "seed", "stream") if key in fields}
    return forced.gateway.client.completions.create(
        **(known | named), extra_body={"ignore_eos": True, "return_token_ids": True, **fields}
    )


def _answers(
    forced: ForcedStack, prompts: Sequence[list[int]], num_tokens: int, before: Callable[[], None] | None = None
) -> list[Any]:
    """The only choices of answers to all of these prompts, which are asked for at once. before: called first, each time
    that they are.
    """

    def complete(prompt: list[int]) -> Any:
        return _complete(forced, prompt, num_tokens).choices[0]

    def ask() -> list[Any]:
        if before is not None:
            before()
        with ThreadPoolExecutor(len(prompts)) as clients:
            return list(clients.map(complete, prompts))

    return until_handed_off(forced.gateway, len(prompts), ask)


def _assert_right(forced: ForcedStack, prompt: list[int], choice: Any, num_tokens: int) -> None:
    expected = generate(forced.model, prompt, num_tokens)
    where = f"prompt of {len(prompt)} tokens"
    assert choice.token_ids == expected.tokens, where
    assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=WITHIN), where


def _scores(forced: ForcedStack, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of what follows each of these tokens but the last, [tokens - 1, vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = oracle(forced.model)(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1)


def _computed_by_decode(forced: ForcedStack) -> float:
    return forced.gateway.settled("baton_worker_computed_tokens", role="decode")


def _kill_decode_worker(forced: ForcedStack) -> None:
    """Kills the decode worker that has the only request, if the gateway knows which."""
    names = {f"127.0.0.1:{port}": name for name, port in forced.stack.ports.items()}
    for entry in forced.gateway.ledger()["rows"]:
        if entry["decode"] is not None:
            forced.stack.workers[names[entry["decode"]]].kill()
