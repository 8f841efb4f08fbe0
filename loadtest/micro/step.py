"""The time of a decode step while the worker's event loop names and publishes the blocks that steps fill.

The engine thread and the event loop share the interpreter lock. Here the engine runs a batch over a model that only
takes time, as a GPU's would, without the lock; the time of a step beyond that is Baton's own.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from kvtransfer.ids import WorkerId
from loadtest.micro.decoding import DecodingWorker
from loadtest.micro.idle_runner import BLOCK_SIZE
from loadtest.micro.own_redis import own_redis
from loadtest.tables import Record, spread
from services.engine.blocks.prefix_cache import CacheEvents
from services.prefix_index.registry import WorkerRecord
from services.protocol.block_hash import BlockHash
from services.worker.block_log import BlockLog
from services.worker.core.state import CoreOutputs
from services.worker.engine_thread import SWITCH_INTERVAL_S
from services.worker.index_link import IndexLink

_MODEL_S = 0.005
_ROUNDS, _STEPS = 5, 200
_KINDS = {  # named, published
    "nothing": (False, False),
    "blocks named": (True, False),
    "blocks named and published": (True, True),
}

_Blocks = Mapping[BlockHash, BlockHash]
HandOn = Callable[[CacheEvents], object]


async def measure(batch: int) -> list[Record]:
    """Measures rounds of three kinds in turn. The event loop ends the work of a round before the next one begins."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    prompts: list[CacheEvents] = []
    steps = len(_KINDS) * _ROUNDS * _STEPS
    worker = DecodingWorker(batch, steps, lambda outputs: prompts.append(outputs.block_events), model_s=_MODEL_S)
    times: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    async with own_redis() as url, _beside(url) as beside:
        beside.name(prompts)
        await beside.settle()
        for _ in range(_ROUNDS):
            for kind, (named, published) in _KINDS.items():
                hand_on = beside.begin(named=named, published=published)
                times[kind] += await asyncio.to_thread(_run, worker, hand_on)
                await beside.settle()
    return [
        {"batch": batch, "model_ms": _MODEL_S * 1e3, "beside": kind, "unit": "ms beyond the model", **_beyond(spent)}
        for kind, spent in times.items()
    ]


class _Beside:
    """The work of a worker's event loop on the blocks that steps fill; some of it may be deferred."""

    def __init__(self, link: IndexLink) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._log = BlockLog("micro")
        self._log.subscribe(self._changed)
        self._published = True
        self._unnamed: list[CacheEvents] = []
        self._unpublished: list[tuple[_Blocks, _Blocks]] = []

    def begin(self, *, named: bool, published: bool) -> HandOn:
        """Begins a round, and returns the function to which the engine thread hands its events."""
        self._published = published
        return self._name_soon if named else self._unnamed.append

    def name(self, events: list[CacheEvents]) -> None:
        """Takes events of blocks that were filled before the rounds."""
        self._unnamed += events

    async def settle(self) -> None:
        """Does the deferred work, and waits until all is done."""
        self._published = True
        for added, evicted in self._unpublished:
            self._link.blocks_changed(added, evicted)
        for events in self._unnamed:
            self._log.append(events)
        self._unnamed, self._unpublished = [], []
        while not (self._log.idle and self._link.idle):
            await asyncio.sleep(0.01)

    def _name_soon(self, events: CacheEvents) -> None:
        self._loop.call_soon_threadsafe(self._log.append, events)

    def _changed(self, added: _Blocks, evicted: _Blocks) -> None:
        if self._published:
            self._link.blocks_changed(added, evicted)
        else:
            self._unpublished.append((added, evicted))


@asynccontextmanager
async def _beside(url: str) -> AsyncIterator[_Beside]:
    link = IndexLink(
        url, WorkerId(1), WorkerRecord("127.0.0.1:0", "decode", WorkerId(1), "micro", "micro", BLOCK_SIZE, 0)
    )
    await link.register()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(link.run())
        yield _Beside(link)
        running.cancel()


def _run(worker: DecodingWorker, hand_on: HandOn) -> list[float]:
    """Runs one round, on a thread of its own, and returns the seconds of each step."""

    def take(outputs: CoreOutputs) -> None:
        if outputs.block_events:
            hand_on(outputs.block_events)

    worker.take = take
    times = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        worker.round()
        times.append(time.perf_counter() - start)
    return times


def _beyond(times: list[float]) -> Record:
    return spread([(spent - _MODEL_S) * 1e3 for spent in times])
