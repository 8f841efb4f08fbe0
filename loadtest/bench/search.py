"""Searches the highest rate within an SLO: runs at one rate after the other, a bounded number of them."""

from collections.abc import Callable
from itertools import islice

from loadtest.bench.drive import Pacing
from loadtest.bench.find_rate import RateSearch, first_rate
from loadtest.bench.plan import Plan
from loadtest.bench.report import Report
from loadtest.bench.result import Step
from loadtest.bench.runner import Measured, Runner
from loadtest.cannot_run import CannotRun

_AT_ONCE = 64  # requests of the first run, which says what the server can answer
_FEWEST, _MOST = 20, 100_000  # requests of a step
_STEPS, _STEP_SECONDS, _ATTAINMENT = 8, 20.0, 0.99


class Search:
    """Runs the steps of a plan. tell: gets a line for each."""

    def __init__(self, plan: Plan, runner: Runner, tell: Callable[[str], None]) -> None:
        self._plan = plan
        self._runner = runner
        self._tell = tell
        self._attainment = plan.settings.attainment or _ATTAINMENT
        self._steps: list[Step] = []
        self._best: Measured | None = None  # at the highest rate that keeps the SLO
        self._lowest: Measured | None = None  # at the lowest rate, where none does

    async def run(self) -> tuple[Measured, list[Step]]:
        """Returns the best step and all of them: that of the highest rate that keeps the SLO, else of the lowest.

        Raises CannotRun where the server answers nothing.
        """
        settings = self._plan.settings
        at_once = None if settings.rate is not None else await self._run_at_once()
        search = RateSearch(settings.rate or first_rate(at_once.report.requests_per_s if at_once else 0.0))
        most = 0 if self._runner.stopped else settings.steps or _STEPS
        while search.num_tried < most and (rate := search.next_rate()) is not None:
            measured = await self._run_at(rate, search.num_tried + 1)
            if self._runner.stopped:
                self._lowest = self._lowest or measured
                break
            keeps = self._note(rate, measured.report)
            if keeps and rate > (search.highest_kept or 0.0):
                self._best = measured
            elif not keeps and rate < (search.lowest_missed or rate + 1):
                self._lowest = measured
            search.tried(rate, kept=keeps)
        self._tell(self._words(search))
        found = self._best or self._lowest or at_once
        assert found is not None
        return found, self._steps

    async def _run_at_once(self) -> Measured:
        scripts = islice(self._plan.workload.scripts([self._plan.settings.seed, 0]), _AT_ONCE)
        self._tell(f"step 0: {_AT_ONCE} requests at once")
        pacing = Pacing(timeout_s=self._plan.settings.timeout)
        measured = await self._runner.measure(pacing, scripts, _AT_ONCE)
        if not measured.report.requests_per_s and not self._runner.stopped:
            raise CannotRun(f"the server answers none of {_AT_ONCE} requests: {'; '.join(measured.report.errors[:3])}")
        self._note(None, measured.report)
        return measured

    async def _run_at(self, rate: float, step: int) -> Measured:
        """Runs one step, with prompts of its own."""
        settings = self._plan.settings
        number = min(max(round(rate * (settings.step_seconds or _STEP_SECONDS)), _FEWEST), _MOST)
        self._tell(f"step {step}: {number} requests at {rate:.3g} a second")
        seed = [settings.seed, step]
        pacing = Pacing(arrivals=self._plan.arrivals(rate, number, seed), timeout_s=settings.timeout)
        return await self._runner.measure(pacing, islice(self._plan.workload.scripts(seed), number), number)

    def _note(self, rate: float | None, report: Report) -> bool:
        """Adds a step, tells how it went, and returns whether enough requests kept the SLO."""
        assert report.goodput is not None
        keeps = report.goodput.share >= self._attainment
        self._steps.append(Step(rate, keeps, report))
        p99 = f", TTFT p99 {report.ttft_ms.p99:.0f} ms" if report.ttft_ms else ""
        limited = "; LIMITED by the client" if report.client and report.client.limits else ""
        self._tell(
            f"    {report.goodput.share:.1%} keep {report.goodput.slo}: {'enough' if keeps else 'too few'} "
            f"({report.requests_per_s:.2f} answers/s{p99}{limited})"
        )
        return keeps

    def _words(self, search: RateSearch) -> str:
        wanted = f"at which {self._attainment:.1%} of the requests keep {self._plan.slo}"
        if search.highest_kept is None:
            return f"no rate was found {wanted}"
        more = "" if search.lowest_missed is None else f"; {search.lowest_missed:.3g} is too much"
        return f"the highest rate {wanted}: {search.highest_kept:.3g} requests/s{more}"
