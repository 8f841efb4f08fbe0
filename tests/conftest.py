"""A skipped test proves nothing: every skip that is not named in allowed_skips.txt fails the run."""

import os
import signal
from pathlib import Path

import pytest

ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")


# Several test processes share the cores, and so do the workers that they start: no thread may spin against the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in a shell's background job. Children would inherit it, and Ctrl-C be no way to end them.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(SkipGuard(_read_allowed(ALLOWED_SKIPS)), "skip-guard")


def _read_allowed(path: Path) -> frozenset[str]:
    lines = (line.partition(" #")[0].strip() for line in path.read_text().splitlines())
    return frozenset(line for line in lines if line and not line.startswith("#"))


class SkipGuard:
    """Notes skips that are not allowed, and turns a run that had one red."""

    def __init__(self, allowed: frozenset[str]) -> None:
        self._allowed = allowed
        self._skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note(report.nodeid)

    def _note(self, nodeid: str) -> None:
        if nodeid not in self._allowed:
            self._skipped.append(nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid in self._skipped:
            terminalreporter.write_line(f"SKIP NOT ALLOWED {nodeid} (see tests/allowed_skips.txt)", red=True)
