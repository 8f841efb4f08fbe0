"""Answers that a store does not take now: so many, so large, and for so long."""

import asyncio

import pytest

from services.gateway.api.side_thread import SideThread
from services.gateway.openai.responses import background_kept
from services.gateway.openai.responses.background_kept import BackgroundResponse
from services.gateway.openai.responses.held import HeldAnswers
from tests.gateway.openai.responses.test_official_client import AwayStore

ENDED = {"id": "resp_1", "status": "completed", "output": []}


def test_a_bounded_number_of_bounded_size_is_held():
    held = HeldAnswers(max_number=3, max_bytes=10)
    assert held.hold("a", "1", b"12345")
    assert not held.hold("a", "2", b"123456")
    assert held.hold("b", "1", b"1234")
    assert (held.get("a", "1"), held.get("b", "1"), held.get("a", "2")) == (b"12345", b"1234", None)
    assert held.hold("a", "3", b"")
    assert not held.hold("a", "4", b"")
    held.remove("a", "1")
    assert held.get("a", "1") is None
    assert held.hold("a", "2", b"123456")


@pytest.mark.parametrize("room", [0, 1])
async def test_an_answer_that_nobody_takes_is_told_at_once_and_held_until_its_time_is_over(
    room: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(background_kept, "_HOLD_S", 2.0)
    held, side = HeldAnswers(max_number=room), SideThread()
    response = BackgroundResponse(AwayStore(), side, held, ("a", "resp_1"), [])
    told: list[object] = []
    ending = asyncio.create_task(response.end(dict(ENDED), [], told.append))
    async with asyncio.timeout(60):
        while not told:
            await asyncio.sleep(0)
        assert told == [ENDED]
        assert (held.get("a", "resp_1") is not None) == bool(room)
        await ending
    assert held.get("a", "resp_1") is None
    assert told == [ENDED]
