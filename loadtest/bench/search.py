"""Searches the highest rate within an SLO: runs at one rate after the other, a bounded number of them."""

from collections.abc import Callable
from itertools import islice

from loadtest.bench.drive import Pacing
from loadtest.bench.find_rate import RateSearch, first_rate
from loadtest.bench.plan import Plan
from loadtest.bench.report import Report
from loadtest.bench.result import Step
from loadtest.bench.runner import Measured, Runner
from loadtest.bench.slo import ATTAINMENT
from loadtest.cannot_run import CannotRun

_AT_ONCE = 64  # scripts of the first run, which says what the server can answer
_FEWEST, _MOST = 20, 100_000  # scripts of a step
_STEPS, _STEP_SECONDS = 8, 20.0


class Search:
    """Runs the steps of a plan. tell: gets a line for each.

    Rates are those of scripts, which are requests or conversations of several; reports count requests.
    """

    def __init__(self, plan: Plan, runner: Runner, tell: Callable[[str], None]) -> None:
        self._plan = plan
        self._runner = runner
        self._tell = tell
        self._attainment = plan.settings.attainment or ATTAINMENT
        self._steps: list[Step] = []
        self._best: Measured | None = None  # at the highest rate that keeps the SLO
        self._lowest: Measured | None = None  # at the lowest rate, where none does

    async def run(self) -> tuple[Measured, list[Step]]:
        """Returns the best step and all of them: that of the highest rate that keeps the SLO, else of the lowest.

        Of a search that was stopped, the steps are those that were complete; without any the first is what there is.
        Raises CannotRun where the server answers nothing.
        """
        settings = self._plan.settings
        at_once = None if settings.rate is not None else await self._run_at_once()
        search = RateSearch(settings.rate or first_rate(_scripts_per_s(at_once.report) if at_once else 0.0))
        most = settings.steps or _STEPS
        while not self._runner.stopped and search.num_tried < most and (rate := search.next_rate()) is not None:
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
        return found or await self._runner.measure(Pacing(), iter(()), 0), self._steps

    async def _run_at_once(self) -> Measured:
        scripts = islice(self._plan.workload.scripts([self._plan.settings.seed, 0]), _AT_ONCE)
        self._tell(f"step 0: {_AT_ONCE} {self._plan.unit} at once")
        pacing = Pacing(timeout_s=self._plan.settings.timeout)
        measured = await self._runner.measure(pacing, scripts, _AT_ONCE)
        if self._runner.stopped:
            return measured
        report = measured.report
        if not report.requests_per_s:
            raise CannotRun(f"the server answers none of {report.requests} requests: {'; '.join(report.errors[:3])}")
        self._note(None, report)
        return measured

    async def _run_at(self, rate: float, step: int) -> Measured:
        """Runs one step, with prompts of its own."""
        settings = self._plan.settings
        number = min(max(round(rate * (settings.step_seconds or _STEP_SECONDS)), _FEWEST), _MOST)
        self._tell(f"step {step}: {number} {self._plan.unit} at {rate:.3g} a second")
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
            return f"{'stopped: ' if self._runner.stopped else ''}no rate was found {wanted}"
        more = "" if search.lowest_missed is None else f"; {search.lowest_missed:.3g} is too much"
        return f"the highest rate {wanted}: {search.highest_kept:.3g} {self._plan.unit}/s{more}"


def _scripts_per_s(at_once: Report) -> float:
    """The scripts that were answered a second in the first run, by the turns of them all."""
    turns = (at_once.requests + at_once.skipped) / _AT_ONCE
    return at_once.requests_per_s / turns if turns else 0.0  # nothing was sent by a search that was stopped
