"""A part that goes on after its own failures."""

import asyncio

import pytest
from structlog.testing import capture_logs

from services.process import supervised as module
from services.process.supervised import supervised
from tests.failures import FAILURES, NAMES


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_S", 0.001)
    monkeypatch.setattr(module, "_LONGEST_S", 0.002)


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
async def test_a_failure_is_logged_once_and_the_part_is_run_again(failure: Exception):
    runs = 0

    async def part() -> str:
        nonlocal runs
        runs += 1
        if runs < 4:
            raise failure
        return "done"

    with capture_logs() as logs:
        assert await supervised("a part", part) == "done"
    assert runs == 4
    (line,) = logs
    assert (line["part"], line["exc_info"], line["log_level"]) == ("a part", failure, "error")


async def test_another_failure_is_logged_too_and_so_is_the_same_one_after_a_long_life(monkeypatch: pytest.MonkeyPatch):
    failures = iter([ValueError("a"), ValueError("a"), ValueError("b"), ValueError("a")])
    told: list[str] = []

    async def part() -> None:
        if (failure := next(failures, None)) is not None:
            raise failure

    await supervised("a part", part, lambda _, error: told.append(str(error)))
    assert told == ["a", "b", "a"]
    monkeypatch.setattr(module, "_FORGIVEN_S", -1.0)
    failures = iter([ValueError("a"), ValueError("a")])
    told.clear()
    await supervised("a part", part, lambda _, error: told.append(str(error)))
    assert told == ["a", "a"]


async def test_the_others_of_a_task_group_go_on():
    async def fails() -> None:
        raise RuntimeError("it fails always")

    async with asyncio.TaskGroup() as group:
        failing = group.create_task(supervised("a part", fails, lambda *_: None))
        await asyncio.sleep(0.02)
        assert not failing.done()
        failing.cancel()


async def test_a_part_that_fails_just_as_it_is_cancelled_ends():
    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ValueError("it failed in its end") from None

    task = asyncio.create_task(supervised("a part", stubborn))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=30)
    assert task.cancelled()
