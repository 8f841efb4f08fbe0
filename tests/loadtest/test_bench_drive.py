"""How scripts are sent: at their times, in their places, turn by turn; and what is kept of answers."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from loadtest.bench import drive as drive_module
from loadtest.bench.drive import Driver, Pacing, drive
from loadtest.bench.endpoints import Chat, Common, Completions, Endpoint
from loadtest.bench.live import Live, Times
from loadtest.bench.outcomes import Outcomes
from loadtest.bench.plan import is_json
from loadtest.bench.report import report
from loadtest.bench.script import Script, Turn
from loadtest.bench.summary import summary
from loadtest.http_stream import Address
from tests.loadtest.bench_server import BenchServer, serving

COMPLETIONS, CHAT = Completions(Common("m")), Chat(Common("m"))


@pytest.fixture
def server() -> Iterator[BenchServer]:
    with serving(BenchServer()) as running:
        yield running


def address(server: BenchServer) -> Address:
    return Address("127.0.0.1", int(server.url.rpartition(":")[2]))


def scripts(number: int, tokens: int = 3, **more: Any) -> list[Script]:
    return [Script((Turn([1, 2, n], tokens),), **more) for n in range(number)]


async def sent(server: BenchServer, wanted: list[Script], endpoint: Endpoint = COMPLETIONS, **pacing: Any) -> Outcomes:
    return await drive(address(server), endpoint, wanted, Pacing(**pacing))


async def test_no_more_than_the_places_are_open(server: BenchServer) -> None:
    server.gap_s = 0.01
    outcomes = await sent(server, scripts(12), concurrency=3)
    assert server.most_open == 3
    assert len(outcomes.good) == 12


async def test_all_at_once_is_all_at_once(server: BenchServer) -> None:
    server.first_s = 0.3
    await sent(server, scripts(12))
    assert server.most_open == 12


async def test_requests_are_sent_at_their_times(server: BenchServer) -> None:
    due_s = [0.0, 0.02, 0.2, 0.2, 0.35]
    outcomes = await sent(server, scripts(5), arrivals=iter(due_s))
    assert outcomes.began_s is not None
    assert (np.sort(outcomes.good.sent_s) - outcomes.began_s >= due_s).all()
    assert outcomes.good.late_s.min() >= 0
    assert np.sort(server.times_s)[-1] - outcomes.began_s >= 0.35


async def test_a_trace_keeps_its_own_times(server: BenchServer) -> None:
    wanted = [script for n in range(3) for script in scripts(1, at_s=0.1 * n)]
    outcomes = await sent(server, wanted, keeps_times=True)
    assert outcomes.good.sent_s[-1] - outcomes.good.sent_s[0] >= 0.15


async def test_requests_of_a_rate_wait_for_a_place_and_are_not_called_late(server: BenchServer) -> None:
    server.first_s = 0.2
    outcomes = await sent(server, scripts(4), arrivals=iter([0.0] * 4), concurrency=1)
    assert server.most_open == 1
    assert outcomes.waited == 3
    assert outcomes.good.late_s.max() < 0.15  # the last one waited for 0.6 s


async def test_nothing_is_sent_when_the_time_is_over(server: BenchServer) -> None:
    endless = (script for _ in iter(int, 1) for script in scripts(1))
    server.gap_s = 0.02
    outcomes = await drive(address(server), COMPLETIONS, endless, Pacing(concurrency=2, seconds=0.5))
    assert outcomes.began_s is not None
    assert outcomes.good.sent_s.max() - outcomes.began_s < 0.5
    assert len(outcomes.good) == len(server.bodies) > 2  # those that were open went on


async def test_what_still_waits_for_a_place_when_the_time_is_over_is_not_sent(server: BenchServer) -> None:
    server.first_s = 0.15
    pacing = Pacing(arrivals=iter([0.0] * 30), concurrency=2, seconds=0.4)
    outcomes = await drive(address(server), COMPLETIONS, scripts(30), pacing)
    assert outcomes.began_s is not None
    assert outcomes.good.sent_s.max() - outcomes.began_s < 0.4
    assert 2 <= len(outcomes.good) == len(server.bodies) <= 6
    assert outcomes.unsent == 30 - len(outcomes.good)
    assert f"{outcomes.unsent} were not sent: the time was over" in summary(report(outcomes))


def test_a_run_has_at_least_one_place() -> None:
    with pytest.raises(AssertionError):
        Pacing(concurrency=0)


async def test_a_turn_has_the_answers_before_it(server: BenchServer) -> None:
    server.role_first = True
    talk = Script((Turn("one", 2), Turn("two", 1), Turn("three", 1)), pause_s=0.05)
    outcomes = await sent(server, [talk], CHAT)
    first, second, third = (body["messages"] for body in server.bodies)
    assert first == [{"role": "user", "content": "one"}]
    assert second == [*first, {"role": "assistant", "content": "word word "}, {"role": "user", "content": "two"}]
    assert third == [*second, {"role": "assistant", "content": "word "}, {"role": "user", "content": "three"}]
    assert len(outcomes.good) == 3
    assert np.diff(server.times_s).min() >= 0.05
    await sent(server, [talk], COMPLETIONS)
    assert server.bodies[-1]["prompt"] == "one\n\nword word \n\ntwo\n\nword \n\nthree"


async def test_a_conversation_ends_with_a_turn_that_fails(server: BenchServer) -> None:
    server.refuses = {1: 503}
    talk = Script(tuple(Turn("said", 1) for _ in range(4)))
    outcomes = await sent(server, [talk], CHAT)
    assert (len(outcomes.good), dict(outcomes.failures), outcomes.skipped) == (1, {"status 503": 1}, 2)


async def test_an_event_with_a_role_alone_is_no_token(server: BenchServer) -> None:
    """Some servers send it before they begin; the time to the first token is that of a token."""
    server.role_first, server.first_s = True, 0.3
    outcomes = await sent(server, [Script((Turn("said", 2),))], CHAT)
    assert outcomes.good.ttft_s[0] >= 0.3
    assert outcomes.gaps.number == 1


async def test_a_request_that_takes_too_long_has_failed(server: BenchServer) -> None:
    server.first_s = 60
    outcomes = await sent(server, scripts(2), timeout_s=0.2)
    assert outcomes.failures == {"timed out": 2}
    assert outcomes.failure_texts == ["not finished after 0.2 s"]
    outcomes = await sent(server, scripts(3), concurrency=1, run_timeout_s=0.3)
    assert (outcomes.failures, outcomes.failure_texts) == ({"timed out": 3}, ["not finished after 0.3 s"])


async def test_a_request_that_fails_waited_and_ran_as_long_as_it_did(server: BenchServer) -> None:
    """One streams until its time is over; the other one's connection is closed without a byte."""
    server.gap_s = 0.05
    outcomes = await sent(server, scripts(1, 100), timeout_s=0.6)
    failed = outcomes.failed
    assert 0 <= failed.ttft_s[0] < 0.4 < 0.6 <= failed.e2e_s[0]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        closing = threading.Thread(target=lambda: listening.accept()[0].close())
        closing.start()
        port = listening.getsockname()[1]
        failed = (await drive(Address("127.0.0.1", port), COMPLETIONS, scripts(1), Pacing())).failed
        closing.join()
    assert failed.sent_s[0] < failed.first_s[0] == failed.last_s[0]


async def test_nobody_there_is_an_error_of_its_own_kind() -> None:
    outcomes = await drive(Address("127.0.0.1", 1), COMPLETIONS, scripts(2), Pacing())
    assert outcomes.failures == {"no connection": 2}


async def test_a_run_that_is_stopped_has_what_there_is(server: BenchServer) -> None:
    server.gap_s = 0.05
    driver = Driver(address(server), COMPLETIONS, Pacing(concurrency=4), iter(scripts(2, 2) + scripts(40, 200)))
    running = asyncio.create_task(driver.run())
    while driver.num_scripts_done < 2:
        await asyncio.sleep(0.01)
    driver.stop()
    driver.stop()
    async with asyncio.timeout(5):
        await running
    outcomes = driver.read_rest()
    assert len(outcomes.good) == 2
    assert 2 <= outcomes.unfinished <= 4
    assert len(server.bodies) <= 6


async def test_answers_are_read_early_where_they_take_too_much_memory(
    server: BenchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive_module, "_UNREAD_BYTES", 2000)
    driver = Driver(address(server), COMPLETIONS, Pacing(concurrency=2), iter(scripts(10, 20)))
    await driver.run()
    assert len(driver.outcomes.good) >= 9  # each answer has more than the bound, or nearly
    assert driver.read_rest().gaps.number == 190


async def test_the_form_of_answers_is_looked_at(server: BenchServer) -> None:
    server.text = "7 "
    driver = Driver(address(server), COMPLETIONS, Pacing(), iter(scripts(3)), is_valid=lambda text: text == "7 7 7 ")
    await driver.run()
    outcomes = driver.read_rest()
    assert (outcomes.num_checked, outcomes.num_valid) == (3, 3)


def test_the_text_of_a_chat_is_its_content_or_the_arguments_of_its_calls() -> None:
    calls = [{"function": {"arguments": '{"a"'}}, {"function": {"name": "f"}}, {"function": {"arguments": ": 1}"}}]
    assert CHAT.text({"delta": {"content": None, "tool_calls": calls}}) == '{"a": 1}'
    assert CHAT.text({"delta": {"content": "said"}}) == "said"
    assert [CHAT.text({}), COMPLETIONS.text({"text": None}), COMPLETIONS.text({"text": "b"})] == ["", "", "b"]


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        pytest.param("[" * 100_000, False, id="too deep"),
        ('{"a": [1]}', True),
        (' {"a": 1}\n{"b": 2} ', True),
        ("", False),
        ('{"a"', False),
        ("{} so", False),
    ],
)
def test_answers_of_structured_output_are_whole_json(text: str, is_whole: bool) -> None:
    assert is_json(text) == is_whole


async def test_bodies_have_what_was_asked_for() -> None:
    common = Common("m", temperature=0.5, ignore_eos=False, extra={"top_p": 0.9, "max_tokens": 4})
    server = BenchServer()
    with serving(server):
        await sent(server, [Script((Turn([5, 6], 3, {"tool_choice": "auto"}),))], Completions(common))
    assert server.bodies[0] == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 4,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tool_choice": "auto",
        "top_p": 0.9,
    }


async def test_live_figures_follow_a_run(server: BenchServer) -> None:
    server.first_s, server.gap_s = 0.1, 0.02
    driver = Driver(address(server), COMPLETIONS, Pacing(concurrency=3), iter(scripts(6, 8)), keeps_recent=True)
    live, running, looks = Live(driver), asyncio.create_task(driver.run()), []
    while not running.done():
        looks.append(live.look(time.perf_counter()))
        await asyncio.sleep(0.05)
    last = live.look(time.perf_counter())
    assert (last.done, last.open, last.failed) == (6, 0, 0)
    assert max(look.open for look in looks) == 3
    assert max(look.pieces_per_s for look in looks) > 0
    first, gap = live.ttft.percentile(50), live.itl.percentile(50)
    assert first is not None
    assert gap is not None
    assert 0.1 <= first < 5
    assert 0.01 <= gap < 5


def test_live_percentiles_are_right_within_a_cell() -> None:
    times, drawn = Times(), np.random.default_rng(0).exponential(0.1, 10_000)
    assert times.percentile(50) is None
    times.add(drawn[:5000])
    times.add(drawn[5000:])
    for percent in (50, 90, 99):
        assert times.percentile(percent) == pytest.approx(np.percentile(drawn, percent), rel=0.06)
