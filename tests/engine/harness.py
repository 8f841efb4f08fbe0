"""Drives an engine over the simulated runner, and says what each request's tokens must be."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from kvtransfer.ids import AttemptId, GatewayId, WorkerId
from kvtransfer.layer_groups import LayerGroups
from kvtransfer.messages import Announcement
from services.config import Pooling
from services.engine.engine import Engine
from services.engine.runner.simulated import SimulatedRunner
from services.engine.schedulers.base import Scheduler
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.outputs import StepRows, row_logprobs
from services.engine.sequences.request import Branch, Kind, Request
from services.protocol.capsule import Capsule
from services.protocol.contents import Media
from services.protocol.frames import Failure, TokenLogprobs
from services.protocol.sampling import SamplingParams

GATEWAY = GatewayId(7)


@dataclass
class Driven:
    """An engine, and what came out of it."""

    engine: Engine
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    announced: list[Announcement] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # of prompts, from the second token on
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # of generated tokens
    naming: set[int] = field(default_factory=set)  # handles whose alternatives are not the likeliest tokens
    embeddings: dict[int, np.ndarray] = field(default_factory=dict)
    num_prompt: dict[int, int] = field(default_factory=dict)
    computed_tokens: int = 0
    now: float = 0.0
    handles: Iterator[int] = field(default_factory=lambda: count(1))

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        num_prompt: int | None = None,
        kind: Kind = Kind.LOCAL,
        paired_with: int = 0,
        seeds: tuple[int, ...] = (),
        salt: str = "",
        priority: int = 0,
        adapter: str = "",
        media: tuple[Media, ...] = (),
        **sampling,
    ) -> int:
        """Submits a request, a moment after the last; returns its handle. `num_prompt`: the rest was generated.

        With seeds, choices over the prompt have the handles that follow.
        """
        handle = next(self.handles)
        self.now += 0.001
        capsule = Capsule(
            np.array(prompt, dtype=np.int32),
            num_prompt or len(prompt),
            SamplingParams(**{"max_tokens": max_tokens, "temperature": 0, **sampling}),
            salt,
            priority,
            adapter=adapter,
            media=media,
        )
        if capsule.sampling.logprob_token_ids:
            self.naming.add(handle)
        branches = tuple(Branch(AttemptId(GATEWAY, next(self.handles)), seed) for seed in seeds)
        self.num_prompt |= dict.fromkeys(range(handle, handle + len(seeds) + 1), capsule.num_prompt)
        id = AttemptId(GATEWAY, handle)
        self.engine.submit(
            Request(id, capsule, kind, self.now, 1e9, paired_with=WorkerId(paired_with), branches=branches)
        )
        return handle

    def embed(
        self, prompt: list[int], pooling: Pooling, *, salt: str = "", priority: int = 0, second_text: int = 0
    ) -> int:
        """Submits a prompt to be embedded; returns its handle."""
        handle = next(self.handles)
        self.now += 0.001
        token_ids, sampling = np.array(prompt, dtype=np.int32), SamplingParams(max_tokens=0)
        capsule = Capsule(token_ids, len(prompt), sampling, salt, priority, pooling, second_text=second_text)
        self.engine.submit(Request(AttemptId(GATEWAY, handle), capsule, Kind.EMBED, self.now, 1e9))
        return handle

    def step(self) -> bool:
        """One step, its outputs taken down; no position may be repeated or skipped, and the blocks are sound."""
        stepped = self.engine.step(self.now)
        self.take()
        self.engine.sequences.check()
        return stepped

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until there is nothing to do."""
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError("the engine does not come to an end")

    def take(self) -> None:
        outputs = self.engine.take_outputs()
        for rows in outputs.rows:
            for row, nth, (handle, position, token, finish, cached) in _tokens_of(rows):
                if position < self.num_prompt[handle]:
                    scores, score = self.scores.setdefault(handle, []), row_logprobs(rows, row, nth)
                    assert score is not None
                    assert (cached, finish) == (-1, 0)
                    if position <= len(scores):  # again, after a preemption
                        assert scores[position - 1] == score
                    else:
                        assert position == len(scores) + 1
                        scores.append(score)
                    continue
                if (logprobs := row_logprobs(rows, row, nth)) is not None:
                    self.logprobs.setdefault(handle, []).append(logprobs)
                    assert handle in self.naming or not logprobs.top or logprobs.top[0][0] == token
                first = not self.tokens.get(handle)
                assert (cached >= 0) == first
                if first:
                    self.cached[handle] = cached
                    self.tokens[handle] = []
                    self._start = getattr(self, "_start", {}) | {handle: position}
                assert position == self._start[handle] + len(self.tokens[handle])
                self.tokens[handle].append(token)
                if finish:
                    self.finish[handle] = finish
        for embedded in outputs.embedded:
            assert embedded.id.handle not in self.embeddings
            self.embeddings[embedded.id.handle] = embedded.values
            self.cached[embedded.id.handle] = embedded.cached
        self.announced += outputs.announcements
        self.failures += [failed.failure for failed in outputs.failed]

    def assert_baseline(self) -> None:
        """Nothing is referenced, and every block is where it belongs."""
        sequences = self.engine.sequences
        sequences.check()
        assert not sequences.requests.ids
        assert sequences.pool.available == sequences.pool.num_blocks


def _tokens_of(rows: StepRows) -> Iterator[tuple[int, int, tuple[int, int, int, int, int]]]:
    """Yields row, number in it, and handle, position, token, finish reason and cached tokens of each token."""
    tokens = iter(rows.tokens.tolist())
    columns = (rows.handles, rows.positions, rows.counts, rows.finish, rows.cached)
    for row, (handle, position, size, finish, cached) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        assert size > 0
        for nth in range(size):
            is_first, is_last = nth == 0, nth == size - 1
            ends, told = finish if is_last else 0, cached if is_first else -1
            yield row, nth, (handle, position + nth, next(tokens), ends, told)
    assert next(tokens, None) is None


def make_engine(
    *,
    num_blocks: int = 1000,
    block_size: int = 4,
    max_num_seqs: int = 64,
    max_model_len: int = 256,
    scheduler: Scheduler | None = None,
    eos_token_ids: tuple[int, ...] = (),
    vocab_size: int = 1000,
    window: int | None = None,
    depth: int = 0,
    nan_token: int | None = None,
    groups: LayerGroups | None = None,
) -> Driven:
    """An engine with the decode policy, unless told otherwise. With a pipeline, steps run as late as they may."""
    runner = SimulatedRunner(
        num_blocks,
        block_size,
        vocab_size=vocab_size,
        window=window,
        late=depth > 0,
        nan_token=nan_token,
        groups=groups,
    )
    driven = Driven(
        Engine(
            runner,
            scheduler or DecodeScheduler(64, prefill_chunk=16),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            pipeline_depth=depth,
        )
    )
    driven.engine.check.learn()
    return driven


def reference(
    prompt: list[int],
    num_tokens: int,
    *,
    block_size: int = 4,
    vocab_size: int = 1000,
    groups: LayerGroups | None = None,
    **sampling,
) -> list[int]:
    """What a request generates when it is alone, uncached and computed in one piece."""
    num_blocks = 256 * (1 if groups is None else groups.num_slices)
    driven = make_engine(
        num_blocks=num_blocks,
        block_size=block_size,
        scheduler=DecodeScheduler(4096),
        vocab_size=vocab_size,
        groups=groups,
    )
    handle = driven.submit(prompt, num_tokens, **sampling)
    driven.run()
    return driven.tokens[handle]
