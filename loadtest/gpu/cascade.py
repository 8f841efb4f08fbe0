"""Decoding behind a long prefix that all rows share: attended to once for all of them, and once for each."""

from collections.abc import Iterator

from loadtest.gpu.bench_model import BenchModel, decode_step, steady
from loadtest.gpu.shapes import BLOCK_SIZE
from loadtest.tables import Record
from services.engine.runner.gpu.gpu_runner import StepLimits

BATCH, SHARED, OWN = 64, 16_384, 128  # rows; tokens
_ROUNDS = 20


def measure(
    model: BenchModel, batch: int = BATCH, shared: int = SHARED, own: int = OWN, rounds: int = _ROUNDS
) -> Iterator[Record]:
    """Yields a record of one step without the shared pass, and one with it."""
    step = decode_step(batch, shared + own, shared=shared // BLOCK_SIZE)
    without_s = 0.0
    for together in (False, True):
        limits = StepLimits(
            max_num_seqs=batch, max_num_batched_tokens=batch, max_model_len=shared + own, share_prefixes=together
        )
        runner = model.runner(int(step.tokens.block_tables.max()) + 1, limits)
        taken = steady(runner, step, rounds).wall
        del runner  # and its pool
        without_s = without_s or taken
        yield {
            "model": model.name,
            "batch": batch,
            "shared": shared,
            "own": own,
            "cascade": "yes" if together else "no",
            "step_ms": taken * 1e3,
            "times_faster": without_s / taken,
        }
