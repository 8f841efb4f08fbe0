"""Each check of forced handoffs finds the bugs that were planted for it."""

import re
from pathlib import Path

import pytest

from tests.e2e.forced_all import run_check
from tests.e2e.forced_bugs import BUGS, Bug
from tests.e2e.forced_checks import CHECKS
from tests.e2e.forced_stack import forced_stack

_BASELINE_S = 10.0  # nothing that a bug leaves behind goes away later


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    with forced_stack(bug.shape, "nixl", tmp_path, bug.in_workers, bug.in_gateway) as forced:
        before = [run_check(check, forced, _BASELINE_S).problem for check in bug.first]
        problem = run_check(bug.check, forced, _BASELINE_S).problem
    assert before == [""] * len(before)
    assert re.search(bug.words, problem), problem


def test_each_check_has_a_bug() -> None:
    assert {bug.check for bug in BUGS} == set(CHECKS)
