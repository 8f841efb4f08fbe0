"""How a run goes: in which order, until when, and what is told of it.

A skipped test proves nothing: every skip that is not named in allowed_skips.txt fails the run. The one exception is a
run that was given a time by which to stop (`--no-start-after`): it says how many tests it did not come to.
"""

import os
import signal
import time
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")
SLOWEST_LAST = ("helm", "launcher", "e2e")  # folders, in the order in which they run after all others
TOGETHER = {  # how node ids begin: tests of one value run in one test process, so that what takes long starts once
    "tests/e2e/": "workers",
    "tests/helm/test_processes.py": "workers",
    "tests/gpu/test_compiles.py": "compiler",
}
OUT_OF_TIME = "not started: out of time"


# Several test processes share the cores, and so do the workers that they start: no thread may spin against the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Triton asks for this when it is first imported, which torch and others do when they please.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in a shell's background job. Children would inherit it, and Ctrl-C be no way to end them.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(SkipGuard(_read_allowed(ALLOWED_SKIPS)), "skip-guard")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-start-after",
        type=float,
        metavar="TIME",
        help="Unix time, in seconds, after which no test starts any more; those left out are counted at the end",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(tests).parts[0]
        return SLOWEST_LAST.index(folder) + 1 if folder in SLOWEST_LAST else 0

    items.sort(key=rank)


class TogetherScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Deals single tests out to test processes; those that belong TOGETHER to the same one.

    By their names: groups as pytest-xdist 3.8 has them, by a marker, are not seen with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return next((group for start, group in TOGETHER.items() if nodeid.startswith(start)), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> TogetherScheduling:
    config.option.loadscopereorder = False  # else the largest groups come first
    return TogetherScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    last_start: float | None = item.config.getoption("--no-start-after")
    is_rerun = getattr(item, "execution_count", 1) > 1  # of pytest-rerunfailures: it failed, and must not end skipped
    if last_start is not None and time.time() > last_start and not is_rerun:
        pytest.skip(OUT_OF_TIME)


def _read_allowed(path: Path) -> tuple[str, ...]:
    lines = (line.partition(" #")[0].strip() for line in path.read_text().splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


class SkipGuard:
    """Notes skips that are not allowed, and turns a run that had one, or in which nothing passed, red.

    A failure is printed when it happens: who ends a run early still learns of it.
    """

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = allowed
        self._skipped: list[str] = []
        self._num_passed = 0
        self._num_out_of_time = 0
        self._terminal: pytest.TerminalReporter | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._terminal = session.config.pluginmanager.get_plugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._num_passed += report.passed and report.when == "call"
        if report.skipped and OUT_OF_TIME in str(report.longrepr):
            self._num_out_of_time += 1
        elif report.skipped and not hasattr(report, "wasxfail"):
            self._note(report.nodeid)
        elif self._terminal is not None and not report.passed:  # failed, or to be run again
            self._terminal.write_line(f"\n{report.outcome.upper()} {report.nodeid} ({report.when})", red=True)
            self._terminal.write_line(report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note(report.nodeid)

    def _note(self, nodeid: str) -> None:
        if not nodeid.startswith(self._allowed):
            self._skipped.append(nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        nothing_ran = self._num_out_of_time > 0 and self._num_passed == 0
        if (self._skipped or nothing_ran) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid in self._skipped:
            terminalreporter.write_line(f"SKIP NOT ALLOWED {nodeid} (see tests/allowed_skips.txt)", red=True)
        if self._num_out_of_time:
            terminalreporter.write_line(f"OUT OF TIME: {self._num_out_of_time} tests did not run", yellow=True)
