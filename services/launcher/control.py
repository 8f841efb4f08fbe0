"""The socket at which a running `baton up` takes commands, and the client's side of it.

A command is one line: a name, then arguments, each NAME=VALUE. The answer is a JSON object for each line that a person
is to read, `{"said": text}`, and at the end `{"failed": text}` or `{"done": true}`. Every few seconds comes a sign of
life. A client that leaves cancels its command.

    client                          launcher
      scale prefill=2\n  ───────────▶  one command at a time
      {"alive": true}  ◀─────────────  at once, and every few seconds
      {"said": "..."}  ◀─────────────
      {"done": true}   ◀─────────────

Client and launcher may be of different versions: a launcher refuses a command that it does not know, and a client
passes over what it does not know of an answer.
"""

import asyncio
import json
import os
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

_DEFAULT_HOST = "127.0.0.1"  # of `baton up`
_ALIVE_EVERY_S = 5.0
SILENCE_S = 60.0  # a launcher that says nothing for so long hangs, or is stopped
_COMMAND_S = 10.0  # for a client's one line

Arguments = Mapping[str, str]
Tell = Callable[[str], None]  # called with each line for the person who gave the command
Command = Callable[[Arguments, Tell], Awaitable[None]]

_PEERCRED_BYTES = struct.calcsize("3i")  # pid, uid, gid

_UNKNOWN = "there is no command"  # how every version's refusal begins


class CommandFailed(Exception):
    """The command went no further. The message is one line, for the person who gave it."""


def socket_path(host: str, port: int) -> Path:
    """The socket of the user's `baton up` whose gateway listens here for HTTP; nobody else can open its directory.

    PORT.sock; for another address than the default one ADDRESS-PORT.sock. Raises OSError for a name of no address.
    """
    address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    return _directory() / (f"{port}.sock" if address == _DEFAULT_HOST else f"{address}-{port}.sock")


def listening_at(port: int) -> list[Path]:
    """The sockets of the user's `baton up`s with this port for HTTP, at whatever address, that somebody listens at."""
    named = [_directory() / f"{port}.sock", *sorted(_directory().glob(f"*-{port}.sock"))]
    return [path for path in named if _is_listened_at(path)]


def socket_of_parent(pid: int) -> Path | None:
    """Finds the socket of the user's `baton up` that started this process of this machine; None: none did."""
    try:
        parent = psutil.Process(pid).ppid()
    except psutil.Error:
        return None
    sockets = sorted(_directory().glob("*.sock"))
    return next((path for path in sockets if _listener(path) == parent), None)


def _listener(path: Path) -> int | None:
    """Returns the process that listens at a socket, as the kernel says."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        if probe.connect_ex(str(path)) != 0:
            return None
        pid: int = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED_BYTES))[0]
        return pid


def _directory() -> Path:
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "baton"
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"


def _is_listened_at(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        return probe.connect_ex(str(path)) == 0


@asynccontextmanager
async def listening(path: Path, commands: Mapping[str, Command]) -> AsyncIterator[None]:
    """Takes commands at this socket while the context lasts.

    Raises OSError where the socket cannot be made, or another launcher has it.
    """
    _make_private(path.parent)
    if _is_listened_at(path):  # as of a launcher in another network namespace
        raise FileExistsError(f"another `baton up` has {path}")
    path.unlink(missing_ok=True)  # of a launcher that was killed
    answering: set[asyncio.Task[None]] = set()
    busy = asyncio.Lock()

    def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_answer(reader, writer, commands, busy))
        answering.add(task)
        task.add_done_callback(answering.discard)
        task.add_done_callback(lambda _: writer.close())  # also where it was cancelled before it began

    server = await asyncio.start_unix_server(on_client, path)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)


def ask(
    path: Path, command: str, silence_s: float = SILENCE_S, connection: socket.socket | None = None
) -> Iterator[str]:
    """Yields the lines of the answer as they come. Raises CommandFailed, or OSError where nobody listens.

    command: its name and its arguments, as words with spaces between them. connection: a new socket of the caller's,
    who can shut it down from another thread, and so leave; it is closed at the end.
    """
    with connection or socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(silence_s)
        try:
            connection.connect(str(path))
            with suppress(ConnectionError), connection.makefile("rw") as stream:
                stream.write(f"{command}\n")
                stream.flush()
                for line in stream:
                    answer = json.loads(line)
                    if "failed" in answer:
                        raise CommandFailed(_in_full(answer["failed"]))
                    if "done" in answer:
                        return
                    if "said" in answer:
                        yield answer["said"]
        except TimeoutError:
            raise CommandFailed(
                f"`baton up` gave no sign of life for {silence_s:g} s: it hangs, or was stopped; look at its output"
            ) from None
    raise CommandFailed("baton up ended before it had answered")


def _in_full(failure: str) -> str:
    if failure.startswith(_UNKNOWN):
        return f"{failure}: this `baton up` is of another version; end it, and start it again"
    return failure


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, commands: Mapping[str, Command], busy: asyncio.Lock
) -> None:
    def send(key: str, value: object) -> None:
        writer.write(json.dumps({key: value}).encode() + b"\n")

    try:
        name, arguments = await _read_command(reader)
        if name not in commands:
            send("failed", f"{_UNKNOWN} {name!r}")
        elif busy.locked():
            send("failed", "another command is under way")
        else:
            async with busy:
                work = commands[name](arguments, lambda text: send("said", text))
                await _while_connected(reader, work, lambda: send("alive", True))
            send("done", True)
    except CommandFailed as failure:
        send("failed", str(failure))
    except Exception as error:  # of this command alone; who gave it hears of it
        send("failed", f"the command failed: {error!r}")


async def _read_command(reader: asyncio.StreamReader) -> tuple[str, Arguments]:
    """Returns its name and its arguments. Raises CommandFailed."""
    try:
        async with asyncio.timeout(_COMMAND_S):
            line = (await reader.readline()).decode(errors="replace")
    except TimeoutError:
        raise CommandFailed(f"no command came within {_COMMAND_S:g} s") from None
    name, *words = line.split() or [""]
    arguments: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals) or key in arguments:
            raise CommandFailed(f"{word!r} is not NAME=VALUE, or has a name that was there already")
        arguments[key] = value
    return name, arguments


async def _while_connected(reader: asyncio.StreamReader, work: Awaitable[None], say_alive: Callable[[], None]) -> None:
    """Awaits the work. It is cancelled when the client leaves, who sends nothing more."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(reader.read())
    try:
        while not (working.done() or leaving.done()):
            say_alive()
            await asyncio.wait((working, leaving), timeout=_ALIVE_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait([working])
    if not working.cancelled():
        working.result()


def _make_private(directory: Path) -> None:
    """Makes the directory if it is not there. Raises PermissionError where another user could have made it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} is open to other users")
