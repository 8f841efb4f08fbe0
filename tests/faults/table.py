"""The table of fault rows at the end of a run: what came of each, and how long recovery took."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.rows import ROWS

ROW, VERDICT = "fault_row", "fault_verdict"  # names among a report's user properties
NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one test's requests: how many were lost or wrong, the blocks leaked, the recovery time."""

    lost: int = 0
    wrong: int = 0
    leaked: int = 0
    recovery_s: float = 0.0


class FaultTable:
    """Collects the results of tests that are marked with a row, and prints all rows if any of them ran."""

    def __init__(self) -> None:
        self._outcomes: dict[int, list[str]] = defaultdict(list)
        self._verdicts: dict[int, list[Verdict]] = defaultdict(list)
        self._skips: dict[int, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Gives each test's rows to its reports, which reach the process that prints."""
        for item in items:
            item.user_properties.extend((ROW, mark.args[0]) for mark in item.iter_markers(ROW))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: list[tuple[str, Any]] = report.user_properties
        for row in [value for name, value in properties if name == ROW]:
            self._note(row, report)

    def _note(self, row: int, report: pytest.TestReport) -> None:
        if report.skipped:
            self._outcomes[row].append("skipped")
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._skips[row] = reason.removeprefix("Skipped: ")
        elif report.failed:
            self._outcomes[row].append("failed")
        elif report.when == "call":
            self._outcomes[row].append("passed")
        if report.when == "call":
            properties: list[tuple[str, Any]] = report.user_properties
            found = [value for name, value in properties if name == VERDICT]
            self._verdicts[row] += [Verdict(*value) for value in found]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._outcomes:
            terminalreporter.write_sep("-", "faults")
            for line in self.lines():
                terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        """The table, without what a row has no figure for."""
        head = f"{'row':>3}  {'fault':<48} {'result':<8} {'lost':>4} {'wrong':>5} {'leaked':>6} {'recovery':>9}"
        return [head, *(self._line(number) for number in ROWS)]

    def _line(self, number: int) -> str:
        start = f"{number:>3}  {ROWS[number]:<48} {self.result(number):<8}"
        if verdicts := self._verdicts[number]:
            lost, wrong, leaked = (sum(getattr(v, name) for v in verdicts) for name in ("lost", "wrong", "leaked"))
            slowest = max(verdict.recovery_s for verdict in verdicts)
            start += f" {lost:>4} {wrong:>5} {leaked:>6} {slowest:>7.2f} s"
        return f"{start}  {self._skips.get(number, '')}".rstrip()

    def result(self, number: int) -> str:
        """The worst result of a row's tests."""
        outcomes = self._outcomes[number]
        if not outcomes:
            return NOT_RUN
        return next(worst for worst in ("failed", "skipped", "passed") if worst in outcomes)
