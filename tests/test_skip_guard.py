"""Which skips leave a run green."""

from pathlib import Path

import pytest

from tests.machine import FEATURES, feature_that_was_missed, flags, has
from tests.skip_guard import OUT_OF_TIME, SkipGuard, read_allowed

WITH_AMX, WITHOUT_AMX = frozenset(FEATURES), frozenset(FEATURES) - {"AMX"}


def skip(nodeid: str, reason: str) -> pytest.TestReport:
    where = ("tests/test_x.py", 1, f"Skipped: {reason}")
    return pytest.TestReport(nodeid, ("", None, ""), {}, "skipped", where, "setup")


def judged(guard: SkipGuard, reason: str, nodeid: str = "tests/test_x.py::test") -> list[str]:
    """What the guard holds against a skip."""
    guard.pytest_runtest_logreport(skip(nodeid, reason))
    return guard.not_allowed


def guard_of(machine: frozenset[str], hidden: frozenset[str] = frozenset()) -> SkipGuard:
    return SkipGuard(("tests/named/",), machine.__contains__, hidden)


def test_a_skip_needs_a_reason_that_holds() -> None:
    assert judged(guard_of(WITHOUT_AMX), "needs AMX") == ["tests/test_x.py::test"]
    assert judged(guard_of(WITHOUT_AMX), "no time today") == ["tests/test_x.py::test"]
    assert judged(guard_of(WITHOUT_AMX), "this machine lacks: SSE") == ["tests/test_x.py::test"]


def test_a_feature_is_lacking_where_the_machine_lacks_it_and_not_where_a_test_says_so() -> None:
    guard = guard_of(WITHOUT_AMX)
    assert judged(guard, "this machine lacks: AMX") == []
    assert guard.summary() == ["SKIPPED: 1 tests need AMX, which this machine lacks"]
    assert judged(guard_of(WITH_AMX), "this machine lacks: AMX") == ["tests/test_x.py::test"]


def test_features_that_a_run_hides_are_counted_apart() -> None:
    guard = guard_of(WITH_AMX, frozenset({"AMX"}))
    assert judged(guard, "this machine lacks: AMX") == []
    assert guard.summary() == ["HIDDEN: 1 tests need AMX, which this run hides"]


def test_named_tests_and_those_out_of_time_are_counted() -> None:
    guard = guard_of(WITH_AMX)
    assert judged(guard, "whatever", "tests/named/test_y.py::test") == []
    assert judged(guard, OUT_OF_TIME) == []
    assert guard.summary() == [
        "SKIPPED: 1 tests that allowed_skips.txt names",
        "OUT OF TIME: 1 tests did not run",
    ]


def test_every_name_has_a_reason(tmp_path: Path) -> None:
    listed = tmp_path / "allowed.txt"
    listed.write_text("# a heading\n\ntests/a.py  # for a reason\n")
    assert read_allowed(listed) == ("tests/a.py",)
    listed.write_text("tests/a.py\n")
    with pytest.raises(ValueError, match=r"tests/a\.py has no reason"):
        read_allowed(listed)


def test_the_processors_flags_are_the_kernels(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu amx_tile avx512f\nbugs\t\t: none\n")
    assert flags(cpuinfo) == {"fpu", "amx_tile", "avx512f"}
    assert "sse2" in flags()
    assert has("no CUDA device") != has("a CUDA device")
    if not {"amx_tile", "amx_bf16"} <= flags():
        assert not has("AMX")
    assert feature_that_was_missed("Skipped: this machine lacks: AMX") == "AMX"
