"""Every row of the fault list has a test, and the table shows what came of it."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.faults.rows import ROWS
from tests.faults.table import NOT_RUN, ROW, VERDICT, FaultTable

TESTS = Path(__file__).parents[1]


def test_every_row_has_a_test():
    marked = {
        int(number)
        for path in TESTS.rglob("test_*.py")
        for number in re.findall(r"^@row\((\d+)\)$", path.read_text(), flags=re.MULTILINE)
    }
    assert sorted(ROWS) == [*range(1, 51), 55, *range(61, 70)], "others are of features that are not here yet"
    assert marked == set(ROWS)


def report(outcome: str, row: int = 7, when: str = "call", **extra: Any) -> pytest.TestReport:
    properties = [(ROW, row), (VERDICT, [0, 1, 2, 3.5])] if when == "call" else [(ROW, row)]
    flags = {name: name == outcome for name in ("passed", "failed", "skipped")}
    return cast(pytest.TestReport, SimpleNamespace(user_properties=properties, when=when, **flags, **extra))


def test_the_table_has_the_worst_result_of_a_row_and_the_sums_of_its_figures():
    table = FaultTable()
    table.pytest_runtest_logreport(report("passed"))
    table.pytest_runtest_logreport(report("failed"))
    table.pytest_runtest_logreport(report("passed", 8, "setup"))
    line = table.lines()[7]
    assert line.split() == ["7", "decode", "worker", "dies", "mid-stream", "failed", "0", "2", "4", "3.50", "s"]
    assert table.result(8) == NOT_RUN


def test_the_table_says_why_a_row_was_skipped():
    table = FaultTable()
    table.pytest_runtest_logreport(report("skipped", when="setup", longrepr=("", 1, "Skipped: no namespaces")))
    assert table.lines()[7].endswith("skipped   no namespaces")
