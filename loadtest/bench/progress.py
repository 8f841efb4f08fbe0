"""The progress of a run on a terminal: a bar, and percentiles so far."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from loadtest.bench.drive import Driver
from loadtest.bench.live import Live, Times

_INTERVAL_S = 0.5  # a look and a line cost about a millisecond
_SHARE = 0.02  # of the time that they may take, where there are many answers to look at


class Progress:
    """Shows runs, one after the other, on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @asynccontextmanager
    async def showing(self, driver: Driver, number: int | None) -> AsyncIterator[None]:
        """Shows a driver's run while the block runs. number: of its scripts, where it is known."""
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with Bars(*columns, console=self._console, auto_refresh=False) as bars:
            task, live = bars.add_task("", total=number), Live(driver)
            following = asyncio.create_task(_follow(bars, task, live))
            try:
                yield
            finally:
                following.cancel()
                with suppress(asyncio.CancelledError):
                    await following
                _show(bars, task, live)


async def _follow(bars: Bars, task: TaskID, live: Live) -> None:
    while True:
        began_s = time.perf_counter()
        _show(bars, task, live)
        await asyncio.sleep(max(_INTERVAL_S, (time.perf_counter() - began_s) / _SHARE))


def _show(bars: Bars, task: TaskID, live: Live) -> None:
    look = live.look(time.perf_counter())
    failed = f" [red]{look.failed} failed[/red]" if look.failed else ""
    words = (
        f"{look.open} open{failed}  {look.pieces_per_s:.0f} tok/s  "
        f"TTFT {_words(live.ttft)}  ITL {_words(live.itl)} (p50/p99)"
    )
    bars.update(task, completed=look.done, description=words)
    bars.refresh()


def _words(times: Times) -> str:
    """Median and 99th percentile."""
    median, high = times.percentile(50), times.percentile(99)
    return "–" if median is None or high is None else f"{_time(median)}/{_time(high)}"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
