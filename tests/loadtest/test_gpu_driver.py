"""`python -m loadtest.gpu` around its parts: whatever becomes of one, the others run, and the report says so."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.gpu.bench import Bench
from loadtest.gpu.command import main
from loadtest.gpu.driver import Driver
from loadtest.gpu.part_process import Found
from loadtest.gpu.parts import PARTS, Part
from loadtest.gpu.results import Results
from tests.machine import NO_GPU, needs


def rows(bench: Bench) -> Iterator[Found]:
    yield {"process": os.getpid(), "seed": bench.seed}
    yield "a note"


def a_row_and_a_failure(bench: Bench) -> Iterator[Found]:
    yield from rows(bench)
    raise RuntimeError("an illegal memory access")


def a_row_and_the_end(bench: Bench) -> Iterator[Found]:
    yield from rows(bench)
    os.kill(os.getpid(), signal.SIGKILL)


def a_row_and_no_end(bench: Bench) -> Iterator[Found]:
    yield from rows(bench)
    time.sleep(600)


def a_missing_package(bench: Bench) -> Iterator[Found]:
    import a_package_that_nobody_has  # type: ignore[import-not-found]

    yield {"never": a_package_that_nobody_has.version}


def a_wrong_kernel(bench: Bench) -> Iterator[Found]:
    yield {"kernels": "some", "failed": 1}


def run(parts: dict[str, Part], tmp_path: Path, seconds: float = 600.0) -> tuple[Driver, dict[str, Any], list[str]]:
    """The driver, rows by the part's title, and notes."""
    driver = Driver(Results(tmp_path, "here"), deadline=time.monotonic() + seconds, seed=5)
    driver.run(list(parts), parts)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert all(note in (tmp_path / "gpu.md").read_text() for note in found["notes"])
    return driver, found["sections"], found["notes"]


def test_parts_that_end_well_share_a_process(tmp_path: Path) -> None:
    driver, sections, notes = run({"a": Part("one", (rows, rows)), "b": Part("two", (rows,))}, tmp_path)
    assert not driver.failed
    assert list(sections) == ["a: one", "b: two"]
    assert len({row["process"] for rows in sections.values() for row in rows}) == 1
    assert [row["seed"] for row in sections["a: one"]] == [5, 5]
    assert notes == ["a: a note"] * 2 + ["b: a note"]


@pytest.mark.long
def test_what_fails_dies_or_hangs_leaves_its_rows_and_the_rest_runs(tmp_path: Path) -> None:
    pieces = (a_row_and_a_failure, a_row_and_the_end, a_row_and_no_end, rows)
    parts = {"a": Part("several", pieces, limit_s=5.0), "b": Part("last", (rows,))}
    driver, sections, notes = run(parts, tmp_path)
    assert driver.failed
    assert len(sections["a: several"]) == 4
    processes = [row["process"] for row in sections["a: several"]]
    assert len(set(processes)) == 4
    assert sections["b: last"][0]["process"] == processes[-1]
    failed, died, hung = (note for note in notes if note.startswith("a: failed"))
    assert "RuntimeError: an illegal memory access" in failed
    assert "raise RuntimeError" in failed
    assert died == "a: failed: its process ended with -9"
    assert hung == "a: failed: no end after 5 s"


def test_a_part_whose_packages_are_missing_is_left_out_in_one_line(tmp_path: Path) -> None:
    driver, sections, notes = run({"a": Part("one", (a_missing_package,)), "b": Part("two", (rows,))}, tmp_path)
    assert not driver.failed
    assert list(sections) == ["b: two"]
    assert notes[0] == "a: left out: No module named 'a_package_that_nobody_has'"


@pytest.mark.long
def test_pieces_that_run_at_once_have_processes_of_their_own(tmp_path: Path) -> None:
    driver, sections, _ = run({"a": Part("both", (rows, a_wrong_kernel), at_once=True)}, tmp_path)
    assert driver.failed, "a check is beyond its bound"
    assert [sorted(row) for row in sections["a: both"]] == [["process", "seed"], ["failed", "kernels"]]


def test_no_part_begins_after_the_deadline(tmp_path: Path) -> None:
    driver, sections, notes = run({"a": Part("one", (rows,))}, tmp_path, seconds=-1.0)
    assert (sections, notes) == ({}, ["a: left out, no time"])
    assert not driver.failed


@needs(NO_GPU)
@pytest.mark.parametrize(("check", "exit_code"), [(rows, 0), (a_wrong_kernel, 1)])
def test_without_a_gpu_kernels_are_checked_and_nothing_is_measured(check, exit_code, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(PARTS, "check", Part("kernels", (check,)))
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # restored
    assert main(["--out", str(tmp_path)]) == exit_code
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert list(found["sections"]) == ["check: kernels"]
    assert found["notes"][-1].startswith("Nothing was measured, there is no CUDA GPU: compile, card, decode, ")
    assert "nothing was measured" in found["about"]
