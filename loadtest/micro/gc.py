"""Objects that steady decoding leaves for the garbage collector, and how often and for how long that stops the worker.

Whole rounds of the worker's engine thread run, as in `scheduler`, in a process that is frozen as a worker's is.
"""

import gc

from loadtest.micro.decoding import DecodingWorker, pack
from loadtest.micro.idle_runner import BLOCK_SIZE
from loadtest.micro.scheduler import gc_objects_per_step
from loadtest.tables import Record
from services.process.gc_watch import GcWatch

_BATCHES = (64, 256)
_PER = 10_000


def measure(steps: int) -> list[Record]:
    """Returns a record for each batch size."""
    return [_measure(batch, steps) for batch in _BATCHES]


def _measure(batch: int, steps: int) -> Record:
    worker = DecodingWorker(batch, steps + BLOCK_SIZE, pack)
    gc.collect()
    gc.freeze()
    before = [each["collections"] for each in gc.get_stats()]
    watch, objects = GcWatch(), len(gc.get_objects())
    for _ in range(steps):
        worker.round()
    kept = len(gc.get_objects()) - objects
    watch.close()
    collections = [each["collections"] - old for each, old in zip(gc.get_stats(), before, strict=True)]
    record: Record = {
        "batch": batch,
        "steps": steps,
        "gc_objects_per_step": gc_objects_per_step(worker),
        "gc_objects_kept_per_step": kept / steps,
        **{f"gen{each}_per_10k": count * _PER / steps for each, count in enumerate(collections)},
        "pause_us_per_10k": watch.pause_s * 1e6 * _PER / steps,
    }
    gc.unfreeze()
    return record
