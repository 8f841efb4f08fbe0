"""Runs workloads against a server, one after the other; a run can be stopped, and has then what there is."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace

from loadtest.bench import counters
from loadtest.bench.drive import Driver, Pacing
from loadtest.bench.endpoints import Endpoint
from loadtest.bench.own_delay import watched
from loadtest.bench.plots import Plots, plots
from loadtest.bench.progress import Progress
from loadtest.bench.report import Report, report
from loadtest.bench.script import Script
from loadtest.bench.slo import Slo
from loadtest.http_stream import Address

WARM_UP_SEED = 1_000_003  # is added to a run's seed for its warm-up


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and what is measured of it. admin: of a Baton, for its counters; None: nobody is asked.

    is_valid: a check of each answer's text.
    """

    address: Address
    endpoint: Endpoint
    admin: Address | None = None
    slo: Slo | None = None
    is_valid: Callable[[str], bool] | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """A run's report, and the points of its plots."""

    report: Report
    plots: Plots


@contextmanager
def _frozen() -> Iterator[None]:
    """Keeps the garbage collector from what there is already, while the block runs: each look at it is a delay."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Runner:
    """Runs scripts against a target. progress: shows each measured run; None: nothing is shown."""

    def __init__(self, target: Target, progress: Progress | None = None) -> None:
        self._target = target
        self._progress = progress
        self._driver: Driver | None = None
        self.stopped = False

    def stop(self) -> None:
        """Ends the run that is under way, and those to come before they begin."""
        self.stopped = True
        if self._driver is not None:
            self._driver.stop()

    async def warm_up(self, pacing: Pacing, scripts: Iterator[Script]) -> None:
        """Runs scripts of which nothing is kept."""
        await self._drive(self._new_driver(pacing, scripts))

    async def measure(self, pacing: Pacing, scripts: Iterator[Script], number: int | None) -> Measured:
        """Runs scripts and sums up. number: of them, where it is known."""
        driver, target = self._new_driver(pacing, scripts), self._target
        before = await counters.read(target.admin)
        async with AsyncExitStack() as stack:
            stack.enter_context(_frozen())
            if self._progress is not None:
                await stack.enter_async_context(self._progress.showing(driver, number))
            delay = await stack.enter_async_context(watched())
            await self._drive(driver)
        after = await counters.read(target.admin)
        counted = counters.difference(before, after) if before and after else None
        outcomes = driver.read_rest()
        found = report(outcomes, counted, target.slo, delay)
        return Measured(replace(found, counters_lost=before is not None and after is None), plots(outcomes))

    def _new_driver(self, pacing: Pacing, scripts: Iterator[Script]) -> Driver:
        target, keeps = self._target, self._progress is not None
        return Driver(target.address, target.endpoint, pacing, scripts, target.is_valid, keeps_recent=keeps)

    async def _drive(self, driver: Driver) -> None:
        self._driver = driver
        if not self.stopped:
            await driver.run()
