"""What fails around one child, or at the launcher's own socket and display, ends neither that child nor the others."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.launcher import child as child_module
from services.launcher import control
from services.launcher.child import ChildFailed, ChildSpec, Supervisor
from services.launcher.commands import Stack
from services.launcher.launcher import Launcher
from services.launcher.members import Start
from services.process import supervised
from services.process.backoff import Backoff
from tests.failures import FAILURES, NAMES, failing, first

TALKS = "while :; do echo word; sleep 0.02; done"


@dataclass
class Screen:
    """A Listener that writes to a stream of its own; the test breaks the writing."""

    events: list[tuple[str, ...]] = field(default_factory=list)

    def starting(self, name: str, what: str) -> None:
        write(self.events, "starting", name)

    def loading(self, name: str, line: str) -> None:
        write(self.events, "loading", name)

    def ready(self, name: str, seconds: float) -> None:
        write(self.events, "ready", name)

    def line(self, name: str, line: str) -> None:
        write(self.events, "line", name)

    def died(self, name: str, how: str, restart_in_s: float) -> None:
        write(self.events, "died", name, how)

    def say(self, text: str) -> None:
        write(self.events, "say", text)


def write(events: list[tuple[str, ...]], *event: str) -> None:
    """The one place where a screen writes."""
    events.append(event)


def answers() -> bool:
    """The one place where a probe asks."""
    return True


@dataclass
class Running:
    """A launcher over two children that talk."""

    screen: Screen
    control: Path
    pids: dict[str, int]  # of the children, by name

    def count(self, *event: str) -> int:
        return sum(each[: len(event)] == event for each in self.screen.events)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(300):
            while not condition():
                await asyncio.sleep(0.005)


def backoff() -> Backoff:
    """Short waits."""
    return Backoff(0.01, 0.02)


async def nothing() -> None:
    """What is to be done when all is ready."""


def child(name: str, pids: dict[str, int]) -> ChildSpec:
    async def probe(pid: int) -> bool:
        pids[name] = pid
        return answers()

    return ChildSpec(name, ("/bin/sh", "-c", TALKS), probe)


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    screen, path, pids = Screen(), tmp_path / "run" / "control", dict[str, int]()
    stack = Stack(redis=None, workers=(child("worker", pids),), gateway=child("gateway", pids))
    launcher = Launcher(stack, Start(lambda _: {}, screen, backoff, 30.0), path)
    started = Running(screen, path, pids)
    serving = asyncio.create_task(launcher.run(nothing))
    try:
        await started.until(lambda: started.count("ready") == 2 and path.exists())
        yield started
        assert not serving.done(), serving
    finally:
        serving.cancel()
        await asyncio.wait([serving])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "_FIRST_S", 0.01)
    monkeypatch.setattr(supervised, "_LONGEST_S", 0.02)


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
async def test_a_child_that_cannot_be_executed_is_started_when_it_can(tmp_path: Path, failure: Exception) -> None:
    async with running(tmp_path) as stack:
        worker, gateway = stack.pids["worker"], stack.pids["gateway"]
        with failing("asyncio.create_subprocess_exec", failure) as failed:
            kill(worker)
            await stack.until(lambda: len(failed) >= 3)
        await stack.until(lambda: stack.count("ready", "worker") == 2)
        assert stack.count("died", "worker") == 2  # by the signal, and once since it cannot be run
        assert stack.pids["worker"] != worker
        assert (stack.pids["gateway"], stack.count("died", "gateway")) == (gateway, 0)


async def test_a_child_that_cannot_be_executed_at_its_first_start_is_tried_again_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "_PATIENCE_S", 3600.0)
    with failing("asyncio.create_subprocess_exec", FAILURES[0], first(3)):
        async with running(tmp_path) as stack:
            assert stack.count("died", "worker") == 1
    never = Supervisor(child("never", {}), {}, screen := Screen(), backoff(), 30.0)

    def exhausts_patience(*_: object) -> bool:
        if len(failed) == 3:
            monkeypatch.setattr(child_module, "_PATIENCE_S", 0.0)
        return True

    cannot = failing("asyncio.create_subprocess_exec", FAILURES[0], exhausts_patience)
    with cannot as failed, pytest.raises(ChildFailed, match="cannot be run"):
        await asyncio.wait_for(never.run(), 300)
    assert (len(failed), len(screen.events)) == (4, 1)


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
async def test_a_probe_that_fails_is_asked_again(tmp_path: Path, failure: Exception) -> None:
    async with running(tmp_path) as stack:
        with failing(f"{__name__}.answers", failure) as failed:
            kill(stack.pids["worker"])
            await stack.until(lambda: len(failed) >= 3)
        await stack.until(lambda: stack.count("ready", "worker") == 2)
        assert stack.count("died") == 1
        assert said(stack, "worker: its probe failed") == 1


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
async def test_output_that_cannot_be_read_is_read_later(tmp_path: Path, failure: Exception) -> None:
    async with running(tmp_path) as stack:
        with failing("asyncio.StreamReader.read", failure) as failed:
            await stack.until(lambda: len(failed) >= 6)
        lines = stack.count("line", "worker")
        await stack.until(lambda: stack.count("line", "worker") > lines)
        assert stack.count("died") == 0
        assert said(stack, "worker: its output failed") == 1


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
async def test_a_display_that_fails_ends_nothing_and_shows_later_lines(tmp_path: Path, failure: Exception) -> None:
    async with running(tmp_path) as stack:
        with failing(f"{__name__}.write", failure) as failed:
            kill(stack.pids["worker"])
            await stack.until(lambda: len(failed) >= 10)
        lines = stack.count("line", "gateway")
        await stack.until(lambda: stack.count("line", "gateway") > lines + 1)
        await stack.until(lambda: said(stack, "lines that could not be shown") > 0)
        assert stack.count("died", "gateway") == 0


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
async def test_a_socket_for_commands_that_cannot_be_made_is_made_later(tmp_path: Path, failure: Exception) -> None:
    with failing("asyncio.start_unix_server", failure) as failed:
        starting = running(tmp_path)
        entering = asyncio.create_task(starting.__aenter__())
        async with asyncio.timeout(300):
            while len(failed) < 3:
                await asyncio.sleep(0.005)
    stack = await entering
    try:
        assert said(stack, "the socket for commands failed") == 1
        assert stack.count("died") == 0
    finally:
        await starting.__aexit__(None, None, None)


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
async def test_a_command_that_fails_is_answered_and_the_next_one_works(tmp_path: Path, failure: Exception) -> None:
    async with running(tmp_path) as stack:
        with (
            failing("json.dumps", failure, lambda value: "done" in value),
            pytest.raises(control.CommandFailed, match=type(failure).__name__),
        ):
            await asyncio.to_thread(lambda: list(control.ask(stack.control, "restart")))
        assert await asyncio.to_thread(lambda: list(control.ask(stack.control, "restart"))) == []
        assert stack.count("died") == 0


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def said(stack: Running, start: str) -> int:
    return sum(event[0] == "say" and event[1].startswith(start) for event in stack.screen.events)
