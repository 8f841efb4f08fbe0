"""Drives an engine over the simulated runner, and says what each request's tokens must be."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from kvtransfer.messages import HandoffId
from services.decode.scheduler import DecodeScheduler
from services.engine.engine import Engine
from services.engine.outputs import Announced
from services.engine.request import Kind, Request
from services.engine.runner.simulated import SimulatedRunner
from services.engine.scheduler import Scheduler
from services.protocol.capsule import Capsule
from services.protocol.frames import Failure
from services.protocol.sampling import SamplingParams

GATEWAY = 7


@dataclass
class Driven:
    """An engine, and what came out of it."""

    engine: Engine
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    announced: list[Announced] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    computed_tokens: int = 0
    now: float = 0.0
    handles: Iterator[int] = field(default_factory=lambda: count(1))

    def submit(self, prompt: list[int], max_tokens: int, *, kind: Kind = Kind.LOCAL, peer: int = 0, **sampling) -> int:
        """Submits a request, a moment after the last; returns its handle."""
        handle = next(self.handles)
        self.now += 0.001
        capsule = Capsule(
            np.array(prompt, dtype=np.int32),
            len(prompt),
            SamplingParams(max_tokens=max_tokens, temperature=0, **sampling),
        )
        id = HandoffId(GATEWAY, handle)
        self.engine.submit(Request(id, capsule, kind, arrival=self.now, deadline=1e9, peer=peer))
        return handle

    def step(self) -> bool:
        """One step, its outputs taken down; no position may be repeated or skipped."""
        stepped = self.engine.step(self.now)
        self.take()
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
            columns = (rows.handles, rows.positions, rows.tokens, rows.finish, rows.cached)
            for handle, position, token, finish, cached in zip(*(column.tolist() for column in columns), strict=True):
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
        self.announced += outputs.announced
        self.failures += [given_up.failure for given_up in outputs.given_up]

    def assert_baseline(self) -> None:
        """Nothing is held, and every block is where it belongs."""
        sequences = self.engine.sequences
        sequences.pool.check()
        assert not sequences.known_ids
        assert sequences.pool.available == sequences.pool.num_blocks


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
) -> Driven:
    """An engine with the decode policy, unless told otherwise."""
    return Driven(
        Engine(
            SimulatedRunner(num_blocks, block_size, vocab_size=vocab_size, window=window),
            scheduler or DecodeScheduler(64, prefill_chunk=16),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
        )
    )


def reference(prompt: list[int], num_tokens: int, *, block_size: int = 4, **sampling) -> list[int]:
    """What a request generates when it is alone, uncached and computed in one piece."""
    driven = make_engine(block_size=block_size, scheduler=DecodeScheduler(4096))
    handle = driven.submit(prompt, num_tokens, **sampling)
    driven.run()
    return driven.tokens[handle]
