"""`baton top` itself, with keys as a person presses them, before a real gateway."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Label, Static

from services.cli.watching import FleetCommands, RunningUp
from services.gateway.overview import WorkerState
from services.launcher import control
from services.top.config import GatewayChoice
from services.top.feed import GatewayClient
from services.top.screen.app import Top
from services.top.screen.lists import MAX_SHOWN, List
from services.top.screen.questions import Confirmation, RequestScreen, ScaleQuestion
from services.top.told import Worker
from tests.gateway.console.scripted_fleet import a_worker
from tests.gateway.keys.key_files import write_keys
from tests.gateway.running_api import Api, running_api
from tests.top.fleets import DECODE, PREFILL, choice, set_workers, until

WIDE, NARROW = (120, 36), (40, 20)


class AtSocket(FleetCommands):
    """Takes a socket for that of the gateway's launcher. tests/launcher/test_control.py has how it is found."""

    def __init__(self, socket: Path) -> None:
        super().__init__(None)
        self._socket = socket

    def launcher_of(self, gateway_pid: int) -> RunningUp:
        return RunningUp(self._socket)


@asynccontextmanager
async def shown(
    api: Api, size: tuple[int, int] = WIDE, commands: FleetCommands | None = None
) -> AsyncIterator[tuple[Top, Pilot]]:
    """The application, after its first tick."""
    async with GatewayClient(choice(api)) as client:
        app = Top(client, commands or FleetCommands(None))
        async with app.run_test(size=size) as pilot:
            await until(lambda: text_of(app, "summary").startswith("gateway "))
            await pilot.pause()
            yield app, pilot


def text_of(app: Top, name: str) -> str:
    return str({"summary": app._summary, "unhealthy": app._unhealthy, "said": app._said}[name].content)


def rows_of(app: Top, tab: str) -> list[list[str]]:
    """The cells of a list, as they are on the screen."""
    found = app._lists[tab]
    return [[str(cell) for cell in found.get_row_at(index)] for index in range(found.row_count)]


async def press(pilot: Pilot, *keys: str) -> None:
    await pilot.press(*keys)
    await pilot.pause()


async def test_workers_links_requests_and_events_are_shown_and_change_with_the_fleet():
    async with running_api() as api:
        set_workers(api)
        async with shown(api) as (app, pilot):
            assert "1 prefill  1 decode" in text_of(app, "summary")
            assert "worker 127.0.0.1:9201" in text_of(app, "unhealthy")
            assert [row[:3] for row in rows_of(app, "workers")] == [
                [PREFILL, "prefill", "ok"],
                [DECODE, "decode", "ok"],
                ["127.0.0.1:9201", "decode", "gone"],
            ]
            api.fleet.workers[1] = a_worker(DECODE, WorkerState.DRAINING)
            await until(lambda: rows_of(app, "workers")[1][2] == "draining")
            answer = await api.chat()
            await press(pilot, "3")
            await until(lambda: len(rows_of(app, "requests")) == 1)
            assert rows_of(app, "requests")[0][1:3] == [answer.headers["x-request-id"], "200 length"]
            await press(pilot, "4")
            await until(lambda: any("draining" in row[1] for row in rows_of(app, "events")))
            await press(pilot, "2")
            assert rows_of(app, "links") == []


async def test_rows_are_sorted_turned_and_filtered():
    async with running_api() as api:
        api.fleet.workers = [a_worker(f"10.0.0.{number}:9200", restarted=(number * 3) % 7) for number in range(1, 7)]
        async with shown(api) as (app, pilot):
            as_told = [row[0] for row in rows_of(app, "workers")]
            titles = [str(column.label) for column in app._lists["workers"].ordered_columns]
            lives = titles.index("lives")
            await press(pilot, *["s"] * (lives + 1))
            assert text_of(app, "said") == "sorted by: lives"
            numbers = [int(row[lives]) for row in rows_of(app, "workers")]
            assert numbers == sorted(numbers)
            await press(pilot, "S")
            assert [int(row[lives]) for row in rows_of(app, "workers")] == sorted(numbers, reverse=True)
            await press(pilot, "slash", *"0.3:")
            assert [row[0] for row in rows_of(app, "workers")] == ["10.0.0.3:9200"]
            await press(pilot, "enter")
            await asyncio.sleep(1.2)  # a tick
            assert [row[0] for row in rows_of(app, "workers")] == ["10.0.0.3:9200"]
            await press(pilot, "escape", "S", *["s"] * (len(titles) - lives))
            assert [row[0] for row in rows_of(app, "workers")] == as_told


async def test_the_chosen_row_stays_chosen_while_rows_come_and_go():
    async with running_api() as api:
        set_workers(api)
        async with shown(api) as (app, pilot):
            await press(pilot, "down")
            workers: List[Any] = app._lists["workers"]
            assert address_of(workers.chosen()) == DECODE
            api.fleet.workers.insert(0, a_worker("10.0.0.1:9100"))
            await until(lambda: len(rows_of(app, "workers")) == 4)
            assert address_of(workers.chosen()) == DECODE
            del api.fleet.workers[2]
            await until(lambda: len(rows_of(app, "workers")) == 3)
            assert workers.chosen() is not None


def address_of(worker: Worker | None) -> str | None:
    return None if worker is None else worker.address


async def test_a_request_is_opened_and_its_phases_add_up():
    async with running_api() as api:
        await api.chat()
        async with shown(api) as (app, pilot):
            await press(pilot, "3", "enter")
            await until(lambda: isinstance(app.screen, RequestScreen))
            await until(lambda: "together" in str(app.screen.query_one("#record", Static).content))
            text = str(app.screen.query_one("#record", Static).content)
            (sum_, whole) = re.findall(r"together +([\d.,]+)  of ([\d.,]+)", text)[0]
            assert abs(float(sum_) - float(whole)) <= 0.1
            await press(pilot, "escape")
            assert not isinstance(app.screen, RequestScreen)


@pytest.mark.long
async def test_a_worker_is_drained_only_after_a_yes_and_what_came_of_it_is_said():
    """By the code of `baton drain`: nobody listens at this address."""
    async with running_api() as api:
        api.fleet.workers = [a_worker("127.0.0.1:1")]
        async with shown(api) as (app, pilot):
            for no in ("n", "escape", "enter"):  # No is chosen
                await press(pilot, "d")
                assert isinstance(app.screen, Confirmation)
                await press(pilot, no)
                assert not isinstance(app.screen, Confirmation)
            assert text_of(app, "said") == ""
            await press(pilot, "d", "y")
            await until(lambda: "cannot be drained" in text_of(app, "said"))
            await press(pilot, "4")
            assert rows_of(app, "events")[0][1:3] == ["drain", "127.0.0.1:1"]
            await press(pilot, "d")
            assert text_of(app, "said") == "choose a worker to be drained (key 1)"


async def test_without_a_launcher_restart_and_scale_say_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with running_api() as api, shown(api) as (app, pilot):
        for key in ("R", "c"):
            await press(pilot, key)
            assert text_of(app, "said").startswith("no `baton up` of this user on this machine runs this gateway")
            assert len(app.screen_stack) == 1


async def test_the_launcher_is_told_to_restart_and_to_scale_and_its_words_are_shown(tmp_path: Path):
    asked: list[tuple[str, dict[str, str]]] = []
    may_end = asyncio.Event()

    async def restart(arguments: control.Arguments, tell: control.Tell) -> None:
        asked.append(("restart", dict(arguments)))
        tell("decode-0 is replaced")
        await may_end.wait()

    async def scale(arguments: control.Arguments, tell: control.Tell) -> None:
        if not arguments:
            tell("2 prefill (prefill-0, prefill-1); 1 decode (decode-0)")
            return
        asked.append(("scale", dict(arguments)))
        raise control.CommandFailed("no memory is left")

    path = tmp_path / "private" / "up.sock"
    async with control.listening(path, {"restart": restart, "scale": scale}), running_api() as api:
        set_workers(api)
        async with shown(api, commands=AtSocket(path)) as (app, pilot):
            await press(pilot, "R", "n", "R", "y")
            await until(lambda: text_of(app, "said") == "restart: decode-0 is replaced")
            await press(pilot, "c")
            assert text_of(app, "said") == "another command is under way"
            may_end.set()
            await until(lambda: app._command.name is None)
            await press(pilot, "c")
            await until(lambda: isinstance(app.screen, ScaleQuestion))
            # One of them is just restarted, so that the gateway has it not.
            assert "has 2 prefill (prefill-0, prefill-1); 1 decode" in str(app.screen.query_one("#here", Label).content)
            await press(pilot, "tab", "0", "enter")
            assert "one decode worker stays" in str(app.screen.query_one("#wrong", Label).content)
            await press(pilot, "backspace", "3", "enter")
            await until(lambda: text_of(app, "said") == "scale: the scaling went no further: no memory is left")
            await press(pilot, "4")
            assert sorted({row[1] for row in rows_of(app, "events")} & {"restart", "scale"}) == ["restart", "scale"]
            await press(pilot, "c")
            await until(lambda: isinstance(app.screen, ScaleQuestion))
            await press(pilot, "enter")  # nothing is filled in
            assert len(app.screen_stack) == 1
    assert asked == [("restart", {}), ("scale", {"decode": "3"})]  # of prefill nothing was said


async def test_who_leaves_while_a_command_is_under_way_is_asked_and_ends_it(tmp_path: Path):
    """The thread that waits for the launcher ends with the application."""
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def restart(arguments: control.Arguments, tell: control.Tell) -> None:
        tell("decode-0 is replaced")
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    path = tmp_path / "private" / "up.sock"
    async with control.listening(path, {"restart": restart}), running_api() as api:
        async with shown(api, commands=AtSocket(path)) as (app, pilot):
            await press(pilot, "R", "y")
            await begun.wait()
            await press(pilot, "q")
            assert isinstance(app.screen, Confirmation)
            await press(pilot, "n")
            assert app._command.name is not None
            assert not cancelled.is_set()
            await press(pilot, "q", "y")
        async with asyncio.timeout(30):
            await cancelled.wait()
        await until(lambda: app._command.name is None)


async def test_a_feed_that_ends_is_said_and_opened_again(tmp_path: Path):
    async with running_api() as api, shown(api) as (app, pilot):
        api.feed._end_all("for the test")
        await until(lambda: "ended its feed: for the test" in text_of(app, "unhealthy"))
        assert rows_of(app, "workers")
        await until(lambda: "not connected" not in text_of(app, "unhealthy"))
        await press(pilot, "q")
    assert app.return_value is None


async def test_where_there_is_no_gateway_the_application_ends_with_the_reason(tmp_path: Path):
    key_set = write_keys(tmp_path / "keys.json")
    async with running_api(keys=key_set.keys()) as api, GatewayClient(choice(api)) as client:
        app = Top(client, FleetCommands(None))
        async with app.run_test():
            await until(lambda: app.return_value is not None)
        assert "it asks for a key" in str(app.return_value)
    async with GatewayClient(GatewayChoice(url="http://127.0.0.1:1")) as client:
        app = Top(client, FleetCommands(None))
        async with app.run_test():
            await until(lambda: app.return_value is not None)
        assert "cannot be reached" in str(app.return_value)


async def test_a_tenant_sees_its_own_requests_and_no_workers(tmp_path: Path):
    key_set = write_keys(tmp_path / "keys.json")
    async with running_api(keys=key_set.keys()) as api:
        set_workers(api)
        own = GatewayChoice(url=api.base_url, api_keys=(key_set.acme,))
        async with GatewayClient(own) as client:
            app = Top(client, FleetCommands(None))
            async with app.run_test(size=WIDE):
                await until(lambda: text_of(app, "summary") == "this key sees its own requests alone")
                assert rows_of(app, "workers") == []


@pytest.mark.parametrize("size", [NARROW, WIDE])
async def test_a_screenshot_has_the_workers_at_any_width(size: tuple[int, int], tmp_path: Path):
    async with running_api() as api:
        set_workers(api)
        async with shown(api, size) as (app, pilot):
            picture = app.export_screenshot()
            assert "127.0.0.1:9100" in picture
            assert "gone" in picture or size == NARROW
            await press(pilot, "d")
            assert "Drain" in app.export_screenshot()


@pytest.mark.long
async def test_hundreds_of_requests_are_listed_up_to_a_limit():
    async with running_api() as api:
        for _ in range(11):
            await asyncio.gather(*(api.chat() for _ in range(20)))
        async with shown(api) as (app, pilot):
            await press(pilot, "3")
            assert len(rows_of(app, "requests")) == MAX_SHOWN
            await press(pilot, "slash", *"none-has-this")
            assert rows_of(app, "requests") == []
