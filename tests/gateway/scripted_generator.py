"""A Generator without workers: gives scripted deltas, and remembers what it was asked and how it was left."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from services.gateway.api.generation import Delta, GenerationError, GenerationRequest, Sink, Unavailable
from services.protocol.capsule import Capsule
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FinishReason


@dataclass
class Script:
    """The deltas that every request gets for each of its choices in turn, then `error`."""

    deltas: Iterable[Delta]
    for_all: bool = True  # False: the deltas say themselves for which choice they are
    error: Exception | None = None
    pause_s: float = 0.0
    gate: asyncio.Event | None = None  # the deltas wait for it, but for the first `before_gate`
    before_gate: int = 0
    hangs: bool = False  # after the deltas
    as_asked: bool = False  # the deltas get the logprobs that their request asks for, or an embedding


@dataclass
class ScriptedGenerator:
    """See Generator. `error` is raised when a request is entered. answer: gives a request's own script."""

    script: Script
    max_model_len: int | None = 256
    embedding_size: int = 4  # 0: no worker embeds
    why_no_embeddings: GenerationError = field(default_factory=lambda: Unavailable("no worker is connected"))
    is_ready: bool = True
    error: GenerationError | None = None
    answer: Callable[[GenerationRequest], Script] | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    running: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    ended: list[int] = field(default_factory=list)  # choices whose client had all it wanted

    def ready(self) -> bool:
        return self.is_ready

    async def until_model_len_known(self) -> int:
        if self.max_model_len is None:
            raise Unavailable("no worker is connected")
        return self.max_model_len

    async def until_embedding_size_known(self) -> int:
        if not self.embedding_size:
            raise self.why_no_embeddings
        return self.embedding_size

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator["ScriptedGeneration"]:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        self.running += 1
        try:
            script = self.script if self.answer is None else self.answer(request)
            yield ScriptedGeneration(script, request.capsules, self.ended)
        finally:
            self.running -= 1
            self.left.set()


class ScriptedGeneration:
    def __init__(self, script: Script, capsules: Sequence[Capsule], ended: list[int]) -> None:
        self._script = script
        self._num_choices = len(capsules)
        self._deltas = self._all(capsules) if script.for_all else iter(script.deltas)
        self._ended = ended
        self._over: set[int] = set()
        self._num_given = 0

    def _all(self, capsules: Sequence[Capsule]) -> Iterator[Delta]:
        for number, delta in enumerate(self._script.deltas):
            for choice, capsule in enumerate(capsules):
                asked = _as_asked(delta, capsule, number == 0) if self._script.as_asked else {}
                yield replace(delta, choice=choice, **asked)

    def end(self, choice: int) -> None:
        self._ended.append(choice)
        self._over.add(choice)

    async def relay(self, sink: Sink) -> None:
        take_token = [sink.token_taker(choice) for choice in range(self._num_choices)]
        goes_on = True
        while goes_on:
            delta = await self.next()
            plain = delta == Delta(delta.tokens, None, FinishReason.NONE, delta.cached_tokens, delta.choice)
            if not (plain and len(delta.tokens) == 1 and take_token[delta.choice](delta.tokens[0])):
                goes_on = sink.take(delta)

    async def next(self) -> Delta:
        await asyncio.sleep(self._script.pause_s)
        if self._script.gate is not None and self._num_given >= self._script.before_gate:
            await self._script.gate.wait()
        self._num_given += 1
        delta = next((delta for delta in self._deltas if delta.choice not in self._over), None)
        if delta is not None:
            return delta
        if self._script.hangs:
            await asyncio.Event().wait()
        assert self._script.error is not None, "read past the end of the script"
        raise self._script.error


def _as_asked(delta: Delta, capsule: Capsule, is_first: bool) -> dict[str, Any]:
    sampling, asked = capsule.sampling, dict[str, Any]()
    if capsule.pooling is not None:
        return {"tokens": [], "embedding": np.ones(4, np.float32)}
    if sampling.num_logprobs is not None:
        top = tuple((token, -1.0) for token in range(sampling.num_logprobs))
        asked["logprobs"] = [TokenLogprobs(-0.5, top)] * len(delta.tokens)
    if sampling.num_prompt_logprobs is not None and is_first:
        top = tuple((token, -1.0) for token in range(sampling.num_prompt_logprobs))
        asked["prompt_logprobs"] = [TokenLogprobs(-0.5, top)] * (capsule.num_prompt - 1)
    return asked


def one_delta(tokens: Sequence[int], finish: FinishReason = FinishReason.LENGTH, cached_tokens: int = 0) -> list[Delta]:
    """All tokens at once."""
    return [Delta(list(tokens), None, finish, cached_tokens)]


def delta_per_token(
    tokens: Sequence[int],
    finish: FinishReason = FinishReason.LENGTH,
    cached_tokens: int = 0,
    logprobs: Sequence[TokenLogprobs] | None = None,
) -> list[Delta]:
    """A delta for each token; the last one has the finish reason."""
    deltas = [
        Delta([token], None if logprobs is None else [logprobs[index]], FinishReason.NONE, cached_tokens)
        for index, token in enumerate(tokens)
    ]
    deltas[-1].finish = finish
    return deltas
