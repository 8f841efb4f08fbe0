"""Rounds: every server in turn, each round with fresh starts and prompts of its own.

Within a round all servers get the same prompts, and they are started anew for each: figures differ more from start to
start than from run to run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loadtest.bench import counters
from loadtest.bench.drive import Pacing, drive
from loadtest.bench.endpoints import Common, Completions
from loadtest.bench.outcomes import Outcomes
from loadtest.bench.prompts import TokenIds
from loadtest.bench.report import Report, report
from loadtest.bench.script import Script
from loadtest.bench.workloads.random_lengths import RandomLengths
from loadtest.compare.servers import MODEL_NAME, Launch, Server, running
from loadtest.compare.workloads import WARM_UP, Compared, Figure
from loadtest.http_stream import Address
from loadtest.processes import ProcessError

_RUN_TIMEOUT_S = 300.0
_WARM_UP_SEED = 999
_ENDPOINT = Completions(Common(MODEL_NAME))


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one workload on one server."""

    round: int
    server: str
    workload: str
    figure: Figure
    report: Report
    short_tokens: int  # tokens that were asked for and are missing
    server_error: str | None = None

    @property
    def value(self) -> float:
        """The figure by which the workload is compared."""
        return value_of(self.report, self.figure)

    @property
    def fault(self) -> str | None:
        """The reason why the run does not count; None when it does."""
        if self.server_error is not None:
            return self.server_error
        if self.report.failed:
            return f"{self.report.failed} requests failed: {'; '.join(self.report.errors)}"
        return f"{self.short_tokens} tokens short" if self.short_tokens else None


def value_of(report: Report, figure: Figure) -> float:
    """Returns a report's figure; 0 where nothing was answered."""
    match figure:
        case Figure.TOKENS_PER_S:
            return report.output_tokens_per_s
        case Figure.REQUESTS_PER_S:
            return report.requests_per_s
        case Figure.TTFT_MS:
            return report.ttft_ms.mean if report.ttft_ms else 0.0
        case Figure.TPOT_MS:
            return report.tpot_ms.mean if report.tpot_ms else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The servers, the workloads and the number of rounds. vocabulary: the size of the model's, for random prompts."""

    servers: Sequence[Server]
    workloads: Sequence[Compared]
    rounds: int
    seed: int
    vocabulary: int

    def scripts(self, load: RandomLengths, round_number: int, index: int) -> list[Script]:
        """The requests of a workload, which are the same for all servers of a round."""
        prompts = TokenIds(self.vocabulary - 1)
        return list(replace(load, prompts=prompts).scripts([self.seed, round_number, index]))


async def run_all(
    comparison: Comparison, tell: Callable[[str], None], after_round: Callable[[list[Run]], None]
) -> list[Run]:
    """Runs all rounds; a server that fails spoils its part of a round. `tell` gets a line as each run ends.

    `after_round` gets all runs so far.
    """
    runs: list[Run] = []
    for round_number in range(1, comparison.rounds + 1):
        for server in comparison.servers:
            tell(f"round {round_number} of {comparison.rounds}: {server.name}: {server.setting}")
            try:
                runs += await _runs(comparison, server, round_number, tell)
            except ProcessError as error:
                tell(f"    {error}")
                runs += _spoiled(comparison, server, round_number, str(error))
        after_round(runs)
    return runs


async def _runs(comparison: Comparison, server: Server, round_number: int, tell: Callable[[str], None]) -> list[Run]:
    runs = []
    async with running(server) as launch:
        await _warm_up(launch.address, comparison)
        for index, wanted in enumerate(comparison.workloads):
            scripts = comparison.scripts(wanted.load, round_number, index)
            for name in wanted.run_names:
                result = await _drive(launch, scripts, wanted)
                short = wanted.output_tokens - result.output_tokens
                run = Run(round_number, server.name, name, wanted.figure, result, short)
                tell(f"    {name:<18} {run.value:>10,.1f} {run.figure}{_aside(run)}")
                runs.append(run)
    return runs


def _spoiled(comparison: Comparison, server: Server, round_number: int, error: str) -> list[Run]:
    """Makes the runs of a server that failed: without figures, with its error."""
    nothing = report(Outcomes())
    return [
        Run(round_number, server.name, name, wanted.figure, nothing, 0, error)
        for wanted in comparison.workloads
        for name in wanted.run_names
    ]


async def _warm_up(address: Address, comparison: Comparison) -> None:
    for index, wanted in enumerate(WARM_UP):
        await drive(address, _ENDPOINT, comparison.scripts(wanted, _WARM_UP_SEED, index), _pacing(None))


async def _drive(launch: Launch, scripts: Sequence[Script], wanted: Compared) -> Report:
    before = await counters.read(launch.metrics)
    outcomes = await drive(launch.address, _ENDPOINT, scripts, _pacing(wanted.concurrency))
    after = await counters.read(launch.metrics)
    return report(outcomes, counters.difference(before, after) if before and after else None)


def _pacing(concurrency: int | None) -> Pacing:
    return Pacing(concurrency, run_timeout_s=_RUN_TIMEOUT_S)


def _aside(run: Run) -> str:
    handed_off = "" if run.report.handed_off is None else f"  ({run.report.handed_off:.0%} handed off)"
    return handed_off + (f"  NOT GOOD: {run.fault}" if run.fault else "")
