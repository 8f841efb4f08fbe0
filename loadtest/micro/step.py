"""What a decode step takes while the worker's event loop names and publishes the blocks that steps fill.

The engine thread and the event loop share the interpreter lock. Here the engine runs a batch over a model that only
takes time, as a GPU's would, with the lock given away; what its steps take beyond that is Baton's own.
"""

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import numpy as np

from kvtransfer.layout import KvLayout
from kvtransfer.messages import HandoffId
from loadtest.micro.own_redis import own_redis
from loadtest.micro.rows import Row, spread
from services.decode.scheduler import DecodeScheduler
from services.engine.batch_state import Phase
from services.engine.engine import Engine
from services.engine.prefix_cache import CacheEvent
from services.engine.request import Kind, Request
from services.engine.runner.base import StepInput, StepOutput
from services.prefix_index.registry import WorkerRecord
from services.protocol.block_hash import BlockHash
from services.protocol.capsule import Capsule
from services.protocol.sampling import SamplingParams
from services.worker.block_log import BlockLog
from services.worker.engine_thread import SWITCH_INTERVAL_S
from services.worker.index_link import IndexLink

_BLOCK_SIZE, _PROMPT = 16, 32
_MODEL_S = 0.005
_ROUNDS, _STEPS = 5, 200
_KINDS = {  # named, published
    "nothing": (False, False),
    "blocks named": (True, False),
    "blocks named and published": (True, True),
}

_Blocks = Mapping[BlockHash, BlockHash]
HandOn = Callable[[list[CacheEvent]], object]


async def measure(batch: int) -> list[Row]:
    """Rounds of three kinds in turn. What a round left for the event loop is done before the next one begins."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    engine = _decoding(batch)
    times: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    async with own_redis() as url, _beside(url) as beside:
        for _ in range(_ROUNDS):
            for kind, (named, published) in _KINDS.items():
                hand_on = beside.begin(named=named, published=published)
                times[kind] += await asyncio.to_thread(_run, engine, hand_on)
                await beside.settle()
    return [
        {"batch": batch, "model_ms": _MODEL_S * 1e3, "beside": kind, "unit": "ms beyond the model", **_beyond(spent)}
        for kind, spent in times.items()
    ]


class _Beside:
    """What a worker's event loop does with the blocks that steps fill; or with some of it kept back."""

    def __init__(self, link: IndexLink) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._log = BlockLog("micro")
        self._log.subscribe(self._changed)
        self._published = True
        self._unnamed: list[CacheEvent] = []
        self._unpublished: list[tuple[_Blocks, _Blocks]] = []

    def begin(self, *, named: bool, published: bool) -> HandOn:
        """Where the engine thread is to put its events."""
        self._published = published
        return self._name_soon if named else self._unnamed.extend

    async def settle(self) -> None:
        """Does what was kept back, and waits until all is done."""
        self._published = True
        for added, evicted in self._unpublished:
            self._link.blocks_changed(added, evicted)
        self._log.append(self._unnamed)
        self._unnamed, self._unpublished = [], []
        while not (self._log.idle and self._link.idle):
            await asyncio.sleep(0.01)

    def _name_soon(self, events: list[CacheEvent]) -> None:
        self._loop.call_soon_threadsafe(self._log.append, events)

    def _changed(self, added: _Blocks, evicted: _Blocks) -> None:
        if self._published:
            self._link.blocks_changed(added, evicted)
        else:
            self._unpublished.append((added, evicted))


@asynccontextmanager
async def _beside(url: str) -> AsyncIterator[_Beside]:
    link = IndexLink(url, 1, WorkerRecord("127.0.0.1:0", "decode", "1", "micro", "micro", _BLOCK_SIZE, 0))
    await link.register()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(link.run())
        yield _Beside(link)
        running.cancel()
    await link.leave()


class _RestingRunner:
    """A `Runner` that computes nothing, for as long as a model would. Each sequence has tokens of its own."""

    vocab_size = 1 << 30
    window: int | None = None

    def __init__(self, num_blocks: int) -> None:
        self.layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=_BLOCK_SIZE, dtype="float32")
        self.num_blocks = num_blocks
        self._num_rows = 0

    def kv_bytes(self) -> np.ndarray:
        """See Runner."""
        return np.zeros((self.num_blocks, self.layout.block_bytes), dtype=np.uint8)

    def copy_block(self, source: int, destination: int) -> None:
        """See Runner."""

    def launch(self, step: StepInput) -> None:
        """See Runner."""
        self._num_rows = len(step.sample_rows)

    def collect(self) -> StepOutput:
        """See Runner."""
        time.sleep(_MODEL_S)
        return StepOutput(np.arange(self._num_rows, dtype=np.int32), None)


def _decoding(batch_size: int) -> Engine:
    """An engine whose sequences all decode; at each step a sixteenth of them fills a block."""
    max_tokens = 3 * _ROUNDS * _STEPS + 100  # and some steps until all decode
    max_model_len = _PROMPT + _BLOCK_SIZE + max_tokens
    num_blocks = batch_size * (max_model_len // _BLOCK_SIZE + 2)
    scheduler = DecodeScheduler(batch_size * (_PROMPT + _BLOCK_SIZE))
    runner = _RestingRunner(num_blocks)
    engine = Engine(runner, scheduler, max_num_seqs=batch_size, max_model_len=max_model_len, eos_token_ids=())
    for number in range(batch_size):
        prompt = number * _PROMPT * 2 + np.arange(_PROMPT + number % _BLOCK_SIZE, dtype=np.int32)
        capsule = Capsule(prompt, len(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        engine.submit(Request(HandoffId(1, number + 1), capsule, Kind.LOCAL, arrival=0.0, deadline=math.inf))
    while len(engine.sequences.batch.slots_in(Phase.DECODE)) < batch_size:
        engine.step(0.0)
        engine.take_outputs()
    return engine


def _run(engine: Engine, hand_on: HandOn) -> list[float]:
    """One round, on a thread of its own: seconds of each step."""
    times = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        engine.step(0.0)
        engine.take_outputs()
        if events := engine.sequences.cache.take_events():
            hand_on(events)
        times.append(time.perf_counter() - start)
    return times


def _beyond(times: list[float]) -> Row:
    return spread([(spent - _MODEL_S) * 1e3 for spent in times])
