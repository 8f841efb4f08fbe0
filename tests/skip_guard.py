"""The guard of skips: a skipped test proves nothing, so every skip fails the run unless it is known to be right.

A skip is right in three cases: allowed_skips.txt names the test with a reason; the test needs what this machine
lacks, by the guard's own look at it and not by the test's word; the run was given a time by which to stop
(`--no-start-after`). What was skipped is counted at the end of the run, each case apart.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.machine import feature_that_was_missed

OUT_OF_TIME = "not started: out of time"


def read_allowed(path: Path) -> tuple[str, ...]:
    """The beginnings of node ids in a file like allowed_skips.txt. Raises ValueError for one without a reason."""
    lines = [line.partition(" # ") for line in path.read_text().splitlines() if line and not line.startswith("#")]
    for start, _, reason in lines:
        if not reason.strip():
            raise ValueError(f"{path.name}: {start} has no reason")
    return tuple(start.strip() for start, _, _ in lines)


class SkipGuard:
    """Turns a run red that had a skip which is not right, or in which nothing passed before its time was over.

    A failure is printed when it happens: who ends a run early still learns of it.
    """

    def __init__(self, allowed: tuple[str, ...], has: Callable[[str], bool], hidden: frozenset[str]) -> None:
        """has: whether the machine has a feature. hidden: features that this run takes it not to have."""
        self._allowed = allowed
        self._has = cache(has)
        self._hidden = hidden
        self._num_named = 0
        self._num_lacking: Counter[str] = Counter()  # by feature
        self._num_hidden: Counter[str] = Counter()  # by feature that the machine has
        self._num_out_of_time = 0
        self._num_passed = 0
        self.not_allowed: list[str] = []
        self._terminal: pytest.TerminalReporter | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._terminal = session.config.pluginmanager.get_plugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._num_passed += report.passed and report.when == "call"
        if report.skipped and not hasattr(report, "wasxfail"):
            self.note(report)
        elif self._terminal is not None and not report.passed:  # failed, or to be run again
            self._terminal.write_line(f"\n{report.outcome.upper()} {report.nodeid} ({report.when})", red=True)
            self._terminal.write_line(report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.note(report)

    def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Judges one skip."""
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        feature = feature_that_was_missed(reason)
        if OUT_OF_TIME in reason:
            self._num_out_of_time += 1
        elif feature is not None and not self._has(feature):
            self._num_lacking[feature] += 1
        elif feature in self._hidden:
            self._num_hidden[feature] += 1
        elif report.nodeid.startswith(self._allowed):
            self._num_named += 1
        else:
            self.not_allowed.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        nothing_ran = self._num_out_of_time > 0 and self._num_passed == 0
        if (self.not_allowed or nothing_ran) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid in self.not_allowed:
            terminalreporter.write_line(f"SKIP NOT ALLOWED {nodeid} (see tests/skip_guard.py)", red=True)
        for line in self.summary():
            terminalreporter.write_line(line, yellow=True)

    def summary(self) -> list[str]:
        """A line for each kind of skip that was right."""
        lines = [
            f"SKIPPED: {count} tests need {name}, which this machine lacks" for name, count in self._num_lacking.items()
        ]
        lines += [
            f"HIDDEN: {count} tests need {name}, which this run hides" for name, count in self._num_hidden.items()
        ]
        if self._num_named:
            lines.append(f"SKIPPED: {self._num_named} tests that allowed_skips.txt names")
        if self._num_out_of_time:
            lines.append(f"OUT OF TIME: {self._num_out_of_time} tests did not run")
        return lines
