"""Latencies of running streams while long prompts arrive: handed over by a prefill worker, or computed beside them.

Both workers are on one card, whose time they share: the prefill worker's steps slow decode's down as if they were its
own, and neither knows of the other. So nothing here speaks for or against disaggregation; that takes two cards. What
can be seen is whether streams ever stall, and what chunks of prompts cost them. Latencies are between frames, as a
gateway sees them. Streams begin at `context` tokens and grow.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from loadtest.gpu.workers import PairSetup, in_turn, pair_of
from loadtest.micro.worker_pair import Stream, WorkerPair
from loadtest.tables import Record, spread
from services.protocol.outcomes import FinishReason

_SETTLED = 10  # tokens of each stream before anything is noted
_START_S, _LOOK_S = 60.0, 0.005
_CAVEAT = "one card's time for both workers: no evidence for disaggregation"


class Kind(StrEnum):
    """The way in which long prompts are computed."""

    NONE = "no long prompts"
    HANDED_OVER = "handed over"
    COLOCATED = "computed by decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The pair of workers, the streams and the long prompts; by default, on the card."""

    pair: PairSetup = field(default_factory=lambda: PairSetup(max_num_seqs=48, decode_tokens=2048))
    streams: int = 32
    context: int = 512
    stream_tokens: int = 8192  # more than a stream gets in `seconds`
    long_prompt: int = 8192
    every_s: float = 1.0
    seconds: float = 12.0  # of each kind


@dataclass(frozen=True, slots=True)
class _Prompt:
    handle: int
    sent_at: float


class _Watch:
    """Reads both workers' frames, and notes when the tokens of each handle came."""

    def __init__(self, pair: WorkerPair) -> None:
        self.arrived: dict[int, list[float]] = defaultdict(list)
        self.finished: set[int] = set()
        self.failed: set[int] = set()
        self._readers = [asyncio.create_task(self._read(stream)) for stream in (pair.prefill, pair.decode)]

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Waits until the condition holds. Raises the error that ended a stream, and TimeoutError."""
        async with asyncio.timeout(_START_S):
            while not is_so():
                self.check()
                await asyncio.sleep(_LOOK_S)

    def check(self) -> None:
        """Raises the error that ended a stream, if one has ended."""
        for reader in self._readers:
            if reader.done():
                reader.result()

    async def close(self) -> None:
        """Ends the readers, and with them the streams."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.wait(self._readers)

    async def _read(self, stream: Stream) -> None:
        while True:
            frame = await stream.frame()
            now = time.monotonic()
            for failure in frame.failures:
                assert failure.handle in self.failed, failure
            for row in frame.rows():
                self.arrived[row.handle] += [now] * len(row.tokens)
                if row.finish is not FinishReason.NONE:
                    self.finished.add(row.handle)


def measure(setup: Setup | None = None) -> Iterator[Record]:
    """Yields a record for each kind."""
    return in_turn(_records(setup or Setup()))


async def _records(setup: Setup) -> AsyncIterator[Record]:
    random = np.random.default_rng(0)
    async with pair_of(setup.pair) as pair:
        watch = _Watch(pair)
        try:
            for kind in Kind:
                yield await _record(setup, kind, pair, watch, random)
        finally:
            await watch.close()


async def _record(setup: Setup, kind: Kind, pair: WorkerPair, watch: _Watch, random: np.random.Generator) -> Record:
    streams = [
        await pair.submit(setup.pair.prompt(random, setup.context), setup.stream_tokens, handed_over=False)
        for _ in range(setup.streams)
    ]
    await watch.until(lambda: all(len(watch.arrived[handle]) >= _SETTLED for handle in streams))
    begin = time.monotonic()
    prompts = await _send_prompts(setup, kind, pair, watch, random)
    end = time.monotonic()
    latencies = np.concatenate([_between(watch.arrived[handle], begin, end) for handle in streams])
    record: Record = {
        "model": setup.pair.name,
        "long_prompts": kind.value,
        "streams": setup.streams,
        "context": setup.context,
        **{f"itl_ms_{name}": value for name, value in spread(latencies * 1e3, (50, 90, 99, 100)).items()},
        "stream_tokens": len(latencies),
        **_of_prompts(setup, prompts, watch),
        "caveat": _CAVEAT,
    }
    for handle in (*streams, *(prompt.handle for prompt in prompts)):
        watch.failed.add(handle)
        await pair.abort(handle)
    return record


async def _send_prompts(
    setup: Setup, kind: Kind, pair: WorkerPair, watch: _Watch, random: np.random.Generator
) -> list[_Prompt]:
    """Sends a prompt every `every_s`, and returns after `seconds`."""
    prompts: list[_Prompt] = []
    begin = time.monotonic()
    for number in range(round(setup.seconds / setup.every_s)):
        await asyncio.sleep(begin + number * setup.every_s - time.monotonic())
        watch.check()
        if kind is not Kind.NONE:
            tokens, sent_at = setup.pair.prompt(random, setup.long_prompt), time.monotonic()
            handle = await pair.submit(tokens, 2, handed_over=kind is Kind.HANDED_OVER)
            prompts.append(_Prompt(handle, sent_at))
    await asyncio.sleep(begin + setup.seconds - time.monotonic())
    return prompts


def _of_prompts(setup: Setup, prompts: list[_Prompt], watch: _Watch) -> Record:
    if not prompts:
        return {}
    firsts = [times[0] - prompt.sent_at for prompt in prompts if (times := watch.arrived[prompt.handle])]
    finished = sum(prompt.handle in watch.finished for prompt in prompts)
    record: Record = {"long_prompt": setup.long_prompt, "sent": len(prompts), "finished": finished}
    return {**record, "ttft_ms_p50": float(np.median(firsts)) * 1e3} if firsts else record


def _between(times: list[float], begin: float, end: float) -> np.ndarray:
    """Returns the seconds from token to token, of the tokens that came between `begin` and `end`."""
    noted = np.array(times)
    return np.diff(noted[(noted >= begin) & (noted <= end)])
