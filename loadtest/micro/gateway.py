"""CPU of a gateway's process for each request and each streamed token, and how many it can take.

The gateway is the one that `baton gateway` runs, behind it real workers whose model costs nothing, before it a client
process; all on loopback, on this machine's cores. Where NVIDIA Dynamo is installed, its front end gets the same
requests from the same client, in turn with Baton.
"""

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import orjson

from loadtest.compare.servers import MODEL_NAME
from loadtest.micro import gateway_servers
from loadtest.micro.flood import Tally, flood
from loadtest.micro.gateway_servers import Gateway
from loadtest.tables import Record
from services.config import HandoffMode, Right
from services.gateway.keys import key_entry
from services.gateway.keys.authentication import Keys
from services.gateway.keys.file import KeysFile
from services.gateway.text.chat_template import load_chat_template
from services.gateway.text.fast_encoder import encode_with, make_fast_encoder
from services.gateway.text.tokenizer import Tokenizer, load_tokenizer
from services.launcher import random_model
from services.protocol.block_hash import block_hashes, root_hash
from services.protocol.model_files.open import open_model

_RUNS_ALONE = 200  # of work that is measured without a gateway
_LOOKUPS = 1000  # of keys, in one run
_BLOCK_SIZE = 16
_SPACE = "Ġ"  # as byte-level vocabularies write it
_STEP_MS = 4.0  # of a worker: fast enough that the gateway has plenty to do, slow enough that it keeps up

_Start = Callable[[], AbstractAsyncContextManager[Gateway]]


class MeasurementFailed(Exception):
    """A gateway refused a request, or answered too little."""


@dataclass(frozen=True, slots=True)
class Work:
    """Requests of one kind, all streamed. Lengths are in tokens."""

    name: str
    path: str
    requests: int
    at_once: int
    input_tokens: int
    output_tokens: int
    tools: bool = False  # the answer may call one, so that its text is parsed


_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_WARM_UP = Work("warm-up", _CHAT, 128, 128, 48, 16)
_WORKS = (
    Work("completions 48/128", _COMPLETIONS, 384, 128, 48, 128),
    Work("chat 1200/8", _CHAT, 400, 64, 1200, 8),
    Work("chat 48/256", _CHAT, 192, 128, 48, 256),
    Work("chat 48/256, with tools", _CHAT, 192, 128, 48, 256, tools=True),
    Work("completions 48/1", _COMPLETIONS, 1000, 64, 48, 1),
)


async def measure(rounds: int, model: Path | None, dynamo: Path | None, tls: int) -> list[Record]:
    """Measures rounds of all gateways in turn, and returns medians; then the cost of some of the work alone.

    model: a Hugging Face directory with a tokenizer and a chat template; None: the random model.
    dynamo: a virtual environment where it is installed; None: it is left out. tls: 1: gateways that speak TLS with
    their workers as well.
    """
    model = model or random_model.made()
    prompts = _Prompts(load_tokenizer(open_model(model)))
    measured: dict[tuple[str, Work], list[Record]] = {}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as client:
        for _ in range(rounds):
            for name, start in _servers(model, dynamo, tls == 1).items():
                async with start() as server:
                    await _run(client, server, _WARM_UP, prompts)
                    for work in _WORKS:
                        measured.setdefault((name, work), []).append(await _run(client, server, work, prompts))
    medians = [_median(name, work, figures) for (name, work), figures in measured.items()]
    return medians + _without_gateway(model, prompts.text(1200)) + [_key_lookup(number) for number in (1, 10_000)]


def _servers(model: Path, venv: Path | None, tls: bool) -> dict[str, _Start]:
    ours: dict[str, _Start] = {}
    for name, mtls in (("", False), (", TLS", True))[: 2 if tls else 1]:
        for kind, handoff in {"handed off": HandoffMode.ALWAYS, "decode alone": HandoffMode.NEVER}.items():
            ours[f"baton, {kind}{name}"] = partial(gateway_servers.baton, model, handoff, _STEP_MS, mtls=mtls)
    return ours if venv is None else {**ours, "dynamo": partial(gateway_servers.dynamo, venv, model)}


class _Prompts:
    """Random texts of a given length in tokens, made of words that are one token each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._random = Random(5)
        vocabulary = tokenizer.backend.get_vocab(with_added_tokens=False)
        words = (token[1:] for token in vocabulary if token.startswith(_SPACE))
        self._words = sorted(" " + word for word in words if word.isascii() and word.isalpha())

    def text(self, num_tokens: int) -> str:
        """Makes a text of `num_tokens` words."""
        return "".join(self._random.choices(self._words, k=num_tokens))

    def body(self, work: Work) -> bytes:
        """Makes the body of one request."""
        text = self.text(work.input_tokens)
        prompt = {"prompt": text} if work.path == _COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
        return orjson.dumps(
            {
                "model": MODEL_NAME,
                **prompt,
                **({"tools": [_TOOL]} if work.tools else {}),
                "max_tokens": work.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )


async def _run(client: ProcessPoolExecutor, server: Gateway, work: Work, prompts: _Prompts) -> Record:
    bodies = [prompts.body(work) for _ in range(work.requests)]
    before = server.cpu_s()
    loop = asyncio.get_running_loop()
    tally = await loop.run_in_executor(client, flood, server.port, work.path, bodies, work.at_once)
    cpu_s = server.cpu_s() - before
    _check(work, tally)
    return {
        "requests_per_s": tally.requests / tally.seconds,
        "tokens_per_s": tally.output_tokens / tally.seconds,
        "cpu_us_per_request": cpu_s / tally.requests * 1e6,
        "cpu_us_per_token": cpu_s / tally.output_tokens * 1e6,
        "tokens_per_event": tally.output_tokens / tally.events,
        "cpu_share": cpu_s / tally.seconds,
        "prompt_tokens": tally.prompt_tokens / tally.requests,
    }


def _check(work: Work, tally: Tally) -> None:
    if tally.errors:
        raise MeasurementFailed(f"{work.name}: {len(tally.errors)} answers failed, one with {tally.errors[0]}")
    if tally.output_tokens != work.requests * work.output_tokens:
        raise MeasurementFailed(f"{work.name}: {tally.output_tokens} tokens came")


def _median(server: str, work: Work, rounds: list[Record]) -> Record:
    figures: Record = {name: statistics.median(float(record[name]) for record in rounds) for name in rounds[0]}
    return {"server": server, "work": work.name, "at_once": work.at_once, **figures}


def _without_gateway(model: Path, text: str) -> list[Record]:
    """Measures work of a chat request that libraries do: the template, tokenizing, and the names of the blocks."""
    files = open_model(model)
    tokenizer = load_tokenizer(files)
    template = load_chat_template(files, tokenizer.special_tokens)
    if template is None:
        raise MeasurementFailed("the model has no chat template")
    messages = [{"role": "user", "content": text}]
    rendered = template.render(messages)
    encode_slowly = partial(encode_with, tokenizer.backend, rendered, add_special_tokens=False)
    tokens = encode_slowly()
    parts: dict[str, Callable[[], object]] = {
        "templating alone": lambda: template.render(messages),
        "tokenizing alone, by tokenizers": encode_slowly,
        "hashing alone": lambda: block_hashes(root_hash("micro"), tokens, _BLOCK_SIZE),
    }
    if (fast := make_fast_encoder(tokenizer.backend)) is not None:
        parts["tokenizing alone, by fastokens"] = partial(fast.encode, rendered, add_special_tokens=False)
    return [
        {"server": "-", "work": f"{name}, chat 1200", "at_once": 1, "cpu_us_per_request": _fastest_us(part)}
        for name, part in parts.items()
    ]


def _key_lookup(num_keys: int) -> Record:
    """Measures what a key adds to a request: its caller is found among those of so many keys."""
    secret, keys = key_entry.new_secret(), [key_entry.new_key() for _ in range(num_keys)]
    entries = tuple(
        key_entry.KeyEntry(id=str(number), hmac_sha256=key_entry.key_digest(secret, key).hex(), created=key_entry.now())
        for number, key in enumerate(keys)
    )
    known, headers = Keys((), KeysFile(secret, entries)), {"authorization": f"Bearer {keys[-1]}"}

    def header(name: str) -> str:
        return headers.get(name, "")

    def look_up() -> None:
        for _ in range(_LOOKUPS):
            known.caller(header, Right.API)

    work = f"the caller of a request, of {num_keys} keys"
    return {"server": "-", "work": work, "at_once": 1, "cpu_us_per_request": _fastest_us(look_up) / _LOOKUPS}


def _fastest_us(call: Callable[[], object]) -> float:
    return min(_seconds(call) for _ in range(_RUNS_ALONE)) * 1e6


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start
