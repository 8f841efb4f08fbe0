"""The socket at which a running `baton up` takes commands, and the client's side of it.

A command is one line. The answer is a JSON object for each line that a person is to read, `{"said": text}`, and at the
end `{"failed": text}` or `{"done": true}`. A client that leaves cancels its command.

    client                      launcher
      restart\n  ───────────────▶  one command at a time
      {"said": "..."}  ◀─────────
      {"done": true}   ◀─────────
"""

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

Tell = Callable[[str], None]  # called with each line for the person who gave the command
Command = Callable[[Tell], Awaitable[None]]


class CommandFailed(Exception):
    """The command went no further. The message is one line, for the person who gave it."""


def socket_path(port: int) -> Path:
    """The socket of the user's `baton up` whose gateway has this port for HTTP; nobody else can open its directory."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "baton" / f"{port}.sock"
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}" / f"{port}.sock"


@asynccontextmanager
async def listening(path: Path, commands: Mapping[str, Command]) -> AsyncIterator[None]:
    """Takes commands at this socket while the context lasts. Raises OSError where the socket cannot be made."""
    _make_private(path.parent)
    path.unlink(missing_ok=True)  # of a launcher that was killed; a living one would hold the port
    answering: set[asyncio.Task[None]] = set()
    busy = asyncio.Lock()

    def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_answer(reader, writer, commands, busy))
        answering.add(task)
        task.add_done_callback(answering.discard)

    server = await asyncio.start_unix_server(on_client, path)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)


def ask(path: Path, command: str) -> Iterator[str]:
    """Yields the lines of the answer as they come. Raises CommandFailed, or OSError where nobody listens."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        with suppress(ConnectionError), connection.makefile("rw") as stream:
            stream.write(f"{command}\n")
            stream.flush()
            for line in stream:
                answer = json.loads(line)
                if "failed" in answer:
                    raise CommandFailed(answer["failed"])
                if "done" in answer:
                    return
                yield answer["said"]
    raise CommandFailed("baton up ended before it had answered")


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, commands: Mapping[str, Command], busy: asyncio.Lock
) -> None:
    def send(key: str, value: object) -> None:
        writer.write(json.dumps({key: value}).encode() + b"\n")

    try:
        name = (await reader.readline()).decode(errors="replace").strip()
        if name not in commands:
            send("failed", f"there is no command {name!r}")
        elif busy.locked():
            send("failed", "another command is under way")
        else:
            async with busy:
                await _while_connected(reader, commands[name](lambda text: send("said", text)))
            send("done", True)
    except CommandFailed as failure:
        send("failed", str(failure))
    except Exception as error:  # of this command alone; who gave it hears of it
        send("failed", f"the command failed: {error!r}")
    finally:
        writer.close()


async def _while_connected(reader: asyncio.StreamReader, work: Awaitable[None]) -> None:
    """Awaits the work. It is cancelled when the client leaves, who sends nothing more."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(reader.read())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
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
