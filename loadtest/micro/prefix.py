"""The cost of admitting a prompt: a worker's lookup, blocks and slot, without the prompt in its cache and with it.

A request is submitted to a worker's core, its scheduler admits it, and an abort ends it: each of the three is timed.
The gateway's hashing of the same prompt is printed beside them; caches that find blocks by hash do that work inside of
their lookup.
"""

import gc
import time
from itertools import count

import numpy as np

from loadtest.micro.decoding import make_core, make_request
from loadtest.micro.idle_runner import BLOCK_SIZE, IdleRunner
from loadtest.tables import Record
from services.engine.schedulers.base import StepPlan
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.sequences import Sequences
from services.protocol.block_hash import block_hashes, root_hash

_LENGTHS = (1 << 10, 4 << 10, 16 << 10, 128 << 10)
_REPETITIONS = 20
_VOCAB = 32_000


def measure() -> list[Record]:
    """Returns a record for each length, cold and cached."""
    return [record for length in _LENGTHS for record in _measure(length)]


class _TimedScheduler(DecodeScheduler):
    """Remembers how long its last plan took."""

    seconds = 0.0

    def plan(self, sequences: Sequences, now: float) -> StepPlan:
        start = time.perf_counter()
        plan = super().plan(sequences, now)
        self.seconds = time.perf_counter() - start
        return plan


def _measure(length: int) -> list[Record]:
    """Measures prompts of `length` tokens and one more: a hit is never the whole prompt."""
    random = np.random.default_rng(length)
    scheduler = _TimedScheduler(length + 1)
    num_blocks = (_REPETITIONS + 2) * (length // BLOCK_SIZE + 2)
    core = make_core(IdleRunner(num_blocks), scheduler, 4, length + BLOCK_SIZE)
    handles = count(1)

    def admit(prompt: np.ndarray) -> tuple[float, float, float]:
        """Returns the microseconds of the submission, of the plan that admits the request, and of its abort."""
        request = make_request(next(handles), prompt, 2)
        start = time.perf_counter()
        core.from_gateways.submit(request, 0.0)
        submitted = time.perf_counter() - start
        core.step(0.0)
        planned = scheduler.seconds
        start = time.perf_counter()
        core.from_gateways.abort(request.id, 0.0)
        ended = time.perf_counter() - start
        core.take_outputs(0.0)
        return submitted * 1e6, planned * 1e6, ended * 1e6

    prompts = [random.integers(0, _VOCAB, length + 1, dtype=np.int32) for _ in range(_REPETITIONS)]
    gc.collect()
    gc.freeze()
    cold = [admit(prompt) for prompt in prompts]
    cached = [admit(prompts[0]) for _ in range(_REPETITIONS)]
    hashing = [_hash(prompt) for prompt in prompts]
    gc.unfreeze()
    return [_record(length, kind, times, hashing) for kind, times in (("cold", cold), ("cached", cached))]


def _hash(prompt: np.ndarray) -> float:
    start = time.perf_counter()
    block_hashes(root_hash("micro"), prompt, BLOCK_SIZE)
    return (time.perf_counter() - start) * 1e6


def _record(length: int, kind: str, times: list[tuple[float, float, float]], hashing: list[float]) -> Record:
    submit, plan, end = np.median(np.array(times), axis=0).tolist()
    return {
        "tokens": length,
        "cache": kind,
        "admission_us": submit + plan,
        "submit_us": submit,
        "plan_us": plan,
        "end_us": end,
        "gateway_hash_us": float(np.median(hashing)),
    }
