"""The supervisor of one child."""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from services.launcher import child as child_module
from services.launcher.child import ChildFailed, ChildSpec, Supervisor
from services.launcher.readiness import NeverReady, NotYet, Probe
from services.process.backoff import Backoff


class Log:
    """Events as they came."""

    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []
        self.on_ready: Callable[[], None] = lambda: None

    def starting(self, name: str, what: str) -> None:
        self.events.append(("starting", name))

    def loading(self, name: str, line: str) -> None:
        self.events.append(("loading", line))

    def ready(self, name: str, seconds: float) -> None:
        self.events.append(("ready", name))
        self.on_ready()

    def line(self, name: str, line: str) -> None:
        self.events.append(("line", line))

    def died(self, name: str, how: str, restart_in_s: float) -> None:
        self.events.append(("died", how))

    def say(self, text: str) -> None:
        self.events.append(("say", text))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a child wrote before its end is read however busy the machine is."""
    monkeypatch.setattr(child_module, "_LAST_WORDS_S", 300.0)


async def ready(_: int) -> bool:
    """The probe of a child that serves."""
    return True


async def unready(_: int) -> bool:
    """The probe of a child that does not serve."""
    return False


def supervisor(code: str, log: Log, probe: Probe = ready, grace_s: float = 600.0) -> Supervisor:
    spec = ChildSpec("child", (sys.executable, "-uc", code), probe)
    return Supervisor(spec, dict(os.environ), log, Backoff(0.01, 0.01), grace_s)


async def run_until(supervised: Supervisor, log: Log, event: tuple[str, ...]) -> float:
    """Runs until the event came, cancels, and returns the seconds that ending took."""
    task = asyncio.create_task(supervised.run())
    async with asyncio.timeout(300):
        while event not in log.events and not task.done():
            await asyncio.sleep(0.01)
    assert event in log.events, task
    started = time.monotonic()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return time.monotonic() - started


async def test_a_child_that_was_never_ready_fails_with_its_last_line() -> None:
    child = supervisor("print('first'); print('no such tensor'); print(); raise SystemExit(3)", Log(), unready)
    with pytest.raises(ChildFailed, match=r"^child did not start: no such tensor$") as failed:
        await child.run()
    assert failed.value.lines == ["first", "no such tensor"]
    assert failed.value.how == "exit code 3"


async def test_a_child_that_said_nothing_fails_with_how_it_ended() -> None:
    with pytest.raises(ChildFailed, match="signal 9, Killed"):
        await supervisor("import os; os.kill(os.getpid(), 9)", Log(), unready).run()


@pytest.mark.parametrize(
    ("answer", "within_s", "why"),
    [
        (NeverReady("nobody wants it"), 60.0, "nobody wants it"),
        (False, 0.5, "it was not ready within 0.5 s"),
        (NotYet("nobody knows it"), 0.5, "it was not ready within 0.5 s: nobody knows it"),
    ],
)
async def test_a_child_that_runs_and_will_not_be_ready_is_ended(
    monkeypatch: pytest.MonkeyPatch, answer: bool | NotYet | NeverReady, within_s: float, why: str
) -> None:
    """Its last line is no reason, and may help all the same. The supervisor's clock moves when the test says so."""
    log, now = Log(), 0.0
    monkeypatch.setattr(child_module, "time", SimpleNamespace(monotonic=lambda: now))

    async def probe(_: int) -> bool | NotYet | NeverReady:
        nonlocal now
        await until(log, "loading", "reading weights")
        now = 0.5
        return answer

    command = (sys.executable, "-uc", "import time; print('reading weights'); time.sleep(3600)")
    spec = ChildSpec("child", command, probe, ready_within_s=within_s)
    child = Supervisor(spec, dict(os.environ), log, Backoff(0.2, 30.0), 600.0)
    with pytest.raises(ChildFailed, match=f"^child did not start: {why}$") as failed:
        await asyncio.wait_for(child.run(), 300)
    assert (failed.value.hopeless, failed.value.lines) == (True, ["reading weights"])


def until_told_ready(log: Log, directory: Path) -> str:
    """Code of a child that goes on once it was ready."""
    told = directory / "ready"
    log.on_ready = told.touch
    return f"import os, time\nwhile not os.path.exists({str(told)!r}): time.sleep(0.01)\n"


async def test_lines_of_a_loading_child_are_shown_again_when_it_is_ready(tmp_path: Path) -> None:
    log = Log()

    async def probe(_: int) -> bool:
        await until(log, "loading", "early")
        return True

    code = f"print('early')\n{until_told_ready(log, tmp_path)}print('late'); time.sleep(3600)"
    await run_until(supervisor(code, log, probe), log, ("line", "late"))
    assert log.events == [("loading", "early"), ("ready", "child"), ("line", "early"), ("line", "late")]


async def test_a_child_that_ends_well_unasked_is_started_again(tmp_path: Path) -> None:
    log = Log()
    await run_until(supervisor(until_told_ready(log, tmp_path), log), log, ("died", "exit code 0"))
    assert ("ready", "child") in log.events


async def test_ending_waits_for_a_child_that_tidies_up() -> None:
    log = Log()
    code = (
        "import signal, sys, time\n"
        "def tidy(*_): time.sleep(0.3); print('tidy'); sys.exit()\n"
        "signal.signal(signal.SIGTERM, tidy); print('here'); time.sleep(3600)"
    )
    await run_until(supervisor(code, log), log, ("line", "here"))
    assert log.events[-1] == ("line", "tidy")


async def test_ending_kills_a_deaf_child_after_its_grace() -> None:
    log = Log()
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here'); time.sleep(3600)"
    seconds = await run_until(supervisor(code, log, grace_s=0.3), log, ("line", "here"))
    assert seconds >= 0.3


TIDIES = (
    "import signal, sys, time\n"
    "def tidy(*_): print('told', flush=True); time.sleep(0.3); print('tidy', flush=True); sys.exit()\n"
    "signal.signal(signal.SIGTERM, tidy); print('here'); time.sleep(3600)"
)


async def until(log: Log, *event: str) -> None:
    async with asyncio.timeout(300):
        while event not in log.events:
            await asyncio.sleep(0.01)


async def test_a_retired_child_tidies_up_and_is_not_started_again() -> None:
    log = Log()
    child = supervisor(TIDIES, log)
    running = asyncio.create_task(child.run())
    await until(log, "line", "here")
    child.retire()
    await running
    assert log.events[-2:] == [("line", "told"), ("line", "tidy")]


async def test_a_child_that_ends_with_its_launcher_while_it_is_retired_is_told_once() -> None:
    log = Log()
    child = supervisor(TIDIES, log)
    running = asyncio.create_task(child.run())
    await until(log, "line", "here")
    child.retire()
    await until(log, "line", "told")
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert log.events[-2:] == [("line", "told"), ("line", "tidy")]
    assert log.events.count(("line", "told")) == 1


class Waits(Log):
    """The waits before a child is started again, in seconds."""

    def died(self, name: str, how: str, restart_in_s: float) -> None:
        self.events.append(("died", f"{restart_in_s:.2f}"))


@pytest.mark.parametrize(("long_life_s", "waits"), [(3600.0, ["0.01", "0.02", "0.03"]), (0.0, ["0.01"] * 3)])
async def test_waits_grow_with_each_short_life_and_start_over_after_a_long_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, long_life_s: float, waits: list[str]
) -> None:
    monkeypatch.setattr(child_module, "_LONG_LIFE_S", long_life_s)
    log = Waits()
    child = supervisor(until_told_ready(log, tmp_path), log)
    child._backoff = Backoff(0.01, 0.03)
    running = asyncio.create_task(child.run())
    async with asyncio.timeout(300):
        while len(died := [what for event, what in log.events if event == "died"]) < 3:
            await asyncio.sleep(0.01)
    child.retire()
    await asyncio.wait_for(running, 300)
    assert died[:3] == waits


async def test_a_retired_child_that_waits_for_its_next_start_has_none(tmp_path: Path) -> None:
    log = Log()
    child = supervisor(until_told_ready(log, tmp_path), log)
    child._backoff = Backoff(3600, 3600)
    running = asyncio.create_task(child.run())
    await until(log, "died", "exit code 0")
    child.retire()
    await asyncio.wait_for(running, 300)


class EndsWithItsGrace:
    """A process that is gone by the time at which it is killed."""

    returncode = None

    def __init__(self) -> None:
        self._gone = asyncio.Event()

    def terminate(self) -> None:
        """It takes its time."""

    def kill(self) -> None:
        self._gone.set()
        raise ProcessLookupError

    async def wait(self) -> int:
        await self._gone.wait()
        return 0


async def test_a_child_may_end_in_the_moment_in_which_its_grace_does() -> None:
    process = cast("asyncio.subprocess.Process", EndsWithItsGrace())
    async with asyncio.timeout(300):
        await supervisor("", Log(), grace_s=0.01)._end(process)


async def test_a_very_long_line_comes_in_pieces_and_loses_nothing() -> None:
    log = Log()
    code = "import time; print('x' * 3_000_000 + 'y'); print('end'); time.sleep(3600)"
    await run_until(supervisor(code, log), log, ("line", "end"))
    pieces = [event[1] for event in log.events if event[0] == "line" and event[1] != "end"]
    assert len(pieces) > 1
    assert sum(map(len, pieces)) >= 3_000_001
