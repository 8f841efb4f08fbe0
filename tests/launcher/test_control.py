"""Commands to a running launcher, over a real socket."""

import asyncio
import contextlib
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.running import restart
from services.config.option import Refusal
from services.launcher import control


async def asked(path: Path, command: str) -> list[str]:
    """The lines of the answer. The client blocks, so it has a thread."""
    return await asyncio.to_thread(lambda: list(control.ask(path, command)))


async def test_lines_come_as_they_are_said_and_the_end_is_known(tmp_path: Path) -> None:
    async def count(arguments: control.Arguments, tell: control.Tell) -> None:
        tell("one")
        await asyncio.sleep(0)
        tell("two")

    path = tmp_path / "private" / "control"
    async with control.listening(path, {"count": count}):
        assert await asked(path, "count") == ["one", "two"]
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.exists()
    with pytest.raises(OSError):
        await asked(path, "count")


async def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    async def fail(arguments: control.Arguments, tell: control.Tell) -> None:
        raise control.CommandFailed("no room")

    path = tmp_path / "private" / "control"
    async with control.listening(path, {"fail": fail}):
        with pytest.raises(control.CommandFailed, match=r"^no room$"):
            await asked(path, "fail")
        with pytest.raises(control.CommandFailed, match="there is no command 'other'"):
            await asked(path, "other")


async def test_there_is_one_command_at_a_time_and_a_client_that_leaves_cancels_its_own(tmp_path: Path) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(arguments: control.Arguments, tell: control.Tell) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    path = tmp_path / "private" / "control"
    async with asyncio.timeout(300), control.listening(path, {"wait": wait}):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"wait\n")
            await begun.wait()
            with pytest.raises(control.CommandFailed, match="another command is under way"):
                await asked(path, "wait")
        await cancelled.wait()


async def test_a_socket_that_a_killed_launcher_left_is_replaced(tmp_path: Path) -> None:
    async def nothing(arguments: control.Arguments, tell: control.Tell) -> None:
        """Does nothing."""

    path = tmp_path / "private" / "control"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with control.listening(path, {"nothing": nothing}):
        assert await asked(path, "nothing") == []


async def test_a_directory_that_others_can_open_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "open" / "control"
    path.parent.mkdir()
    path.parent.chmod(0o755)
    with pytest.raises(PermissionError, match="is open to other users"):
        async with control.listening(path, {}):
            pass


def test_the_socket_is_in_the_user_s_runtime_directory_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert control.socket_path("127.0.0.1", 8000) == Path("/run/user/7/baton/8000.sock")


async def test_two_stacks_at_one_port_of_different_addresses_have_sockets_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def nothing(arguments: control.Arguments, tell: control.Tell) -> None:
        """Does nothing."""

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    paths = [control.socket_path(host, 8000) for host in ("127.0.0.1", "127.0.0.2", "0.0.0.0", "::1")]
    assert len(set(paths)) == 4
    async with contextlib.AsyncExitStack() as stack:
        for number, path in enumerate(paths, 1):
            await stack.enter_async_context(control.listening(path, {"nothing": nothing}))
            assert control.listening_at(8000) == sorted(paths[:number], key=lambda path: ("-" in path.name, path))
        await stack.enter_async_context(control.listening(control.socket_path("127.0.0.1", 18000), {}))
        assert len(control.listening_at(8000)) == 4
        with pytest.raises(Refusal, match=r"several .* at port 8000 .*127\.0\.0\.2-8000.*--host"):
            await asyncio.to_thread(restart, None, 8000)
        with pytest.raises(OSError, match="another `baton up` has"):
            await stack.enter_async_context(control.listening(paths[0], {}))
        for path in paths:  # which also answers all those who only asked whether somebody listens
            assert await asked(path, "nothing") == []
    assert control.listening_at(8000) == []


@pytest.mark.long
async def test_a_client_waits_while_there_are_signs_of_life_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The silent launcher is one that was stopped: its kernel still takes connections."""

    async def take_long(arguments: control.Arguments, tell: control.Tell) -> None:
        await asyncio.sleep(5.5)
        tell("at last")

    monkeypatch.setattr(control, "_ALIVE_EVERY_S", 0.1)
    path = tmp_path / "private" / "control"
    async with control.listening(path, {"long": take_long}):
        assert await asyncio.to_thread(lambda: list(control.ask(path, "long", silence_s=5.0))) == ["at last"]
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(control.CommandFailed, match=r"gave no sign of life for 0\.5 s"):
            await asyncio.to_thread(lambda: list(control.ask(path, "long", silence_s=0.5)))


async def test_the_launcher_of_a_process_is_found_by_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever listens there is the process's parent; other sockets beside it do not matter."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = control.socket_path("127.0.0.1", 8000)
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    async with control.listening(path, {}):
        (path.parent / "7999.sock").touch()  # as one that a killed launcher left
        with subprocess.Popen(sleeper, stdin=subprocess.PIPE) as child:
            assert control.socket_of_parent(child.pid) == path
            assert control.socket_of_parent(os.getpid()) is None
            child.communicate()
        assert control.socket_of_parent(child.pid) is None
