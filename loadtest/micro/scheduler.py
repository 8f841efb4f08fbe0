"""The cost of a decode step beside the model: schedule, blocks, stop checks, outputs, frames up to their bytes.

Whole rounds of the worker's engine thread are measured, with the event loop's work on each frame, on one thread; only
the runner is replaced, by one that returns at once. Nothing is left out or subtracted.
"""

import gc
import statistics
import time

from loadtest.micro.decoding import DecodingWorker, pack, packed
from loadtest.micro.idle_runner import BLOCK_SIZE
from loadtest.tables import Record, spread

_BATCHES = (1, 8, 64, 256, 1024)


def measure(steps: int) -> list[Record]:
    """Returns a record for each batch size."""
    return [_measure(batch, steps) for batch in _BATCHES]


def _measure(batch: int, steps: int) -> Record:
    worker = DecodingWorker(batch, steps + BLOCK_SIZE, pack)
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        worker.round()
        times.append((time.perf_counter() - start) * 1e6)
    mean = statistics.fmean(times)
    return {
        "batch": batch,
        "us_per_step": mean,
        **spread(times, (0, 50, 99)),
        "us_per_token": mean / batch,
        "gc_objects_per_step": gc_objects_per_step(worker),
    }


def gc_objects_per_step(worker: DecodingWorker) -> float:
    """Counts the objects that a step leaves for the collector while its outputs are alive, mean of 16 steps.

    In these steps each sequence fills a block once.
    """
    kept: list[object] = []
    worker.take = lambda outputs: kept.extend((outputs, packed(outputs)))
    gc.collect()
    gc.freeze()
    gc.disable()
    counts = []
    for _ in range(BLOCK_SIZE):
        before = len(gc.get_objects())
        worker.round()
        counts.append(len(gc.get_objects()) - before)
        kept.clear()
    gc.enable()
    gc.unfreeze()
    return statistics.fmean(counts)
