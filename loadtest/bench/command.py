"""`baton bench`: checks settings, runs, prints the figures, and writes them where they are wanted.

Ctrl-C, and SIGTERM, end a run with the figures that there are so far; a second one ends the process.
"""

import asyncio
import resource
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import uvloop
from rich.console import Console

from loadtest.bench import counters
from loadtest.bench.drive import Pacing
from loadtest.bench.html.page import check_plotly, write_page
from loadtest.bench.plan import Plan, make_plan
from loadtest.bench.progress import Progress
from loadtest.bench.result import Facts, Result, Step, read_result, write_result
from loadtest.bench.runner import WARM_UP_SEED, Measured, Runner, Target
from loadtest.bench.search import Search
from loadtest.bench.server import describe, first_model
from loadtest.bench.settings import Settings
from loadtest.bench.summary import summary
from loadtest.cannot_run import CannotRun
from loadtest.http_stream import HttpError, reached
from loadtest.processor import processor

INTERRUPTED = 130
_MOST_REPORTS = 50
_SECRETS = ("--api-key",)


def bench(settings: Settings, command: Sequence[str]) -> int:
    """Runs a load, and returns the exit code: 0 when every request was answered, 1 when one failed, 130 after Ctrl-C.

    command: the command line, for reports. Raises CannotRun where there is no run.
    """
    plan = make_plan(settings)
    if settings.report is not None:
        check_plotly()
    console = Console(stderr=True)
    progress = Progress(console) if console.is_terminal else None
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result, stopped = runner.run(_run(plan, command, progress))
    except HttpError as error:
        raise CannotRun(str(error)) from error
    sys.stdout.write(summary(result.report) + "\n")
    _write(result, settings)
    return INTERRUPTED if stopped else 1 if result.report.failed else 0


def _write(result: Result, settings: Settings) -> None:
    """Writes the files that are asked for. Raises CannotRun."""
    try:
        if settings.json is not None:
            write_result(result, settings.json)
        if settings.report is not None:
            write_page([result], settings.report)
    except OSError as error:
        raise CannotRun(f"the figures above were not written: {error}") from error


def report(files: Sequence[Path], page: Path) -> int:
    """Writes one page of several results, and returns 0. Raises CannotRun."""
    check_plotly()
    if len(files) > _MOST_REPORTS:
        raise CannotRun(f"a page has at most {_MOST_REPORTS} runs")
    results = [read_result(file) for file in files]
    try:
        write_page(results, page)
    except OSError as error:
        raise CannotRun(f"--report {page}: {error}") from error
    return 0


async def _run(plan: Plan, command: Sequence[str], progress: Progress | None) -> tuple[Result, bool]:
    """Returns the result, and whether the run was stopped. Raises HttpError, CannotRun."""
    _raise_file_limit()
    settings, address = plan.settings, await reached(plan.address)
    model = settings.model or await first_model(address)
    if plan.admin is not None and await counters.read(plan.admin) is None:
        raise CannotRun(f"--admin-url {settings.admin_url}: no counters of a Baton are there")
    facts = Facts(
        command=command_words(command),
        began=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        server=f"{address.authority}, {await describe(address)}",
        model=model,
        workload=plan.workload.name,
        arrivals=plan.pacing_words(),
        client=f"{_own_version()} on {processor()}",
    )
    runner = Runner(Target(address, plan.endpoint(model), plan.admin, plan.slo, plan.is_valid), progress)
    _on_signals(runner.stop)
    if settings.warmup:
        warm_up = plan.chosen.warm_up.scripts(settings.seed + WARM_UP_SEED)
        await runner.warm_up(Pacing(settings.concurrency, timeout_s=settings.timeout), warm_up)
    measured, steps = await _measured(plan, runner)
    return Result(settings.label or model, facts, measured.report, measured.plots, steps), runner.stopped


async def _measured(plan: Plan, runner: Runner) -> tuple[Measured, list[Step]]:
    if plan.settings.find_rate:
        return await Search(plan, runner, _tell).run()
    scripts = plan.workload.scripts(plan.settings.seed)
    return await runner.measure(plan.pacing(), scripts, plan.workload.num_scripts), []


def command_words(command: Sequence[str]) -> str:
    """A command line as it may be shown: without keys."""
    words, hides = [], False
    for argument in command:
        name, equals, _ = argument.partition("=")
        words.append("***" if hides else f"{name}=***" if equals and name in _SECRETS else argument)
        hides = argument in _SECRETS
    return shlex.join(words)


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _on_signals(stop: Callable[[], None]) -> None:
    """Stops a run at the first Ctrl-C or SIGTERM. The second one does what it does without us."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, first)


def _raise_file_limit() -> None:
    """Allows as many connections as this process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _own_version() -> str:
    try:
        return f"baton {version('baton-serve')}"
    except PackageNotFoundError:  # run out of a directory
        return "baton"
