"""A TCP proxy that spoils connections on purpose: silent, slow, cut or refused, one way or both, for some clients.

It stands before one server. Whose a connection is follows from the process that has its socket, so that a fault may lie
between two processes and leave a third one alone, though all of them dial the same port. All connections are served by
one event loop in a thread of its own; methods may be called from any other thread, and return when they have worked.
"""

import asyncio
import contextlib
import enum
import os
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

_PIECE_BYTES = 65536
_SLICE_S = 0.05  # a slow connection passes on what it may in such a time
_CALL_TIMEOUT_S = 10.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST

T = TypeVar("T")


class Way(enum.Enum):
    """A direction of a connection."""

    TO_SERVER = "to the server"
    TO_CLIENT = "to the client"


BOTH = (Way.TO_SERVER, Way.TO_CLIENT)


@dataclass(frozen=True, slots=True)
class Rule:
    """The treatment of one direction. `replaced`: bytes, and those of equal length that take their place."""

    silent: bool = False
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    replaced: tuple[bytes, bytes] | None = None


_UNTOUCHED = Rule()


@dataclass(slots=True, eq=False)
class _Connection:
    client: str
    writers: dict[Way, asyncio.StreamWriter]
    passed: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(Way, 0))

    def reset(self) -> None:
        for writer in self.writers.values():
            with contextlib.suppress(OSError):  # it is closed already
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


class ProxyThread:
    """The event loop of some proxies, in a thread; ends with the context."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="proxies", daemon=True)

    def __enter__(self) -> "ProxyThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(_cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CALL_TIMEOUT_S)
        self.loop.close()

    def run(self, work: Coroutine[None, None, T]) -> T:
        """Runs a coroutine on the loop, and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(_CALL_TIMEOUT_S)


class Proxy:
    """A port before a server. Clients are named by `processes`, process ids by name; a fault is for names that begin
    with a given word, and "" means everybody.
    """

    def __init__(
        self,
        thread: ProxyThread,
        address: tuple[str, int],
        server: tuple[str, int],
        processes: Callable[[], Mapping[str, int]],
    ) -> None:
        """processes: called for each new connection. Raises OSError where the address is taken."""
        self._thread = thread
        self._address = address
        self._server_address = server
        self._processes = processes
        self._rules: list[tuple[str, Way, Rule]] = []  # later ones first
        self._changed = asyncio.Event()  # replaced by another one with each change of the rules
        self._connections: set[_Connection] = set()
        self._listening: asyncio.Server | None = None
        thread.run(self._listen())

    def silence(self, client: str = "", ways: tuple[Way, ...] = BOTH) -> None:
        """Passes nothing on until `heal`, and then what has come meanwhile."""
        self._change(client, ways, silent=True)

    def slow(self, client: str, bytes_per_s: float, ways: tuple[Way, ...] = BOTH) -> None:
        """Passes so many bytes a second on."""
        self._change(client, ways, bytes_per_s=bytes_per_s)

    def delay(self, client: str, delay_s: float, ways: tuple[Way, ...] = BOTH) -> None:
        """Passes each piece on so much later."""
        self._change(client, ways, delay_s=delay_s)

    def replace(self, client: str, old: bytes, new: bytes, way: Way) -> None:
        """Passes other bytes on instead of `old`, where these lie within one piece."""
        if len(old) != len(new):
            raise ValueError("the length of what is replaced must stay")
        self._change(client, (way,), replaced=(old, new))

    def reset(self, client: str = "") -> int:
        """Resets the connections of a client, and returns how many there were."""
        return self._thread.run(self._reset(client))

    def refuse(self) -> None:
        """Refuses new connections from everybody; those that there are go on."""
        self._thread.run(self._close())

    def heal(self) -> None:
        """Passes everything on from now on, also what was held back, and listens again."""
        self._thread.run(self._heal())

    def clients(self) -> list[str]:
        """Names of the clients, one for each connection."""
        return sorted(connection.client for connection in tuple(self._connections))

    def num_passed(self, client: str, way: Way) -> int:
        """Bytes that the client's connections have passed on so far."""
        return sum(each.passed[way] for each in tuple(self._connections) if each.client.startswith(client))

    def close(self) -> None:
        """Stops listening and resets all connections."""
        self._thread.run(self._close())
        self._thread.run(self._reset(""))

    def _change(self, client: str, ways: tuple[Way, ...], **values: object) -> None:
        self._thread.run(self._add(client, ways, values))

    async def _add(self, client: str, ways: tuple[Way, ...], values: Mapping[str, object]) -> None:
        for way in ways:
            rule = replace(self._rule(client, way), **values)  # type: ignore[arg-type]
            self._rules.insert(0, (client, way, rule))
        self._wake()

    async def _reset(self, client: str) -> int:
        theirs = [each for each in self._connections if each.client.startswith(client)]
        for connection in theirs:
            connection.reset()
        return len(theirs)

    async def _heal(self) -> None:
        self._rules.clear()
        self._wake()
        if self._listening is None:
            await self._listen()

    async def _listen(self) -> None:
        self._listening = await asyncio.start_server(self._serve, *self._address)

    async def _close(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _rule(self, client: str, way: Way) -> Rule:
        return next((rule for who, on, rule in self._rules if on is way and client.startswith(who)), _UNTOUCHED)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = self._name_of(writer.get_extra_info("peername")[1])
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._server_address)
        except OSError:  # nobody is there, and the client sees a reset, as it nearly would
            _Connection(client, {Way.TO_CLIENT: writer}).reset()
            return
        connection = _Connection(client, {Way.TO_SERVER: server_writer, Way.TO_CLIENT: writer})
        self._connections.add(connection)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(connection, Way.TO_SERVER, reader))
                group.create_task(self._pump(connection, Way.TO_CLIENT, server_reader))
        finally:
            self._connections.discard(connection)
            for each in connection.writers.values():
                each.transport.abort()

    async def _pump(self, connection: _Connection, way: Way, reader: asyncio.StreamReader) -> None:
        writer, limit = connection.writers[way], _PIECE_BYTES
        try:
            while data := await reader.read(limit):
                data = await self._treated(connection.client, way, data)
                connection.passed[way] += len(data)
                writer.write(data)
                await writer.drain()
                rate = self._rule(connection.client, way).bytes_per_s
                limit = _PIECE_BYTES if rate is None else max(1, int(rate * _SLICE_S))
            await self._treated(connection.client, way, b"")  # a silent network does not tell of an end either
            writer.write_eof()
        except OSError:  # either side has reset its connection, which the other one then sees too
            connection.reset()

    async def _treated(self, client: str, way: Way, data: bytes) -> bytes:
        """Waits as long as the rules want, and returns what they leave of the data."""
        while (rule := self._rule(client, way)).silent:
            await self._changed.wait()
        if rule.replaced is not None:
            data = data.replace(*rule.replaced)
        late_s = rule.delay_s + (len(data) / rule.bytes_per_s if rule.bytes_per_s else 0)
        if late_s:
            await asyncio.sleep(late_s)
        return data

    def _name_of(self, port: int) -> str:
        """The name of the process that has this end of a connection; "?" for one that is not known."""
        if (inode := _inode_of(port, self._address[1])) is not None:
            for name, pid in self._processes().items():
                if inode in _sockets_of(pid):
                    return name
        return "?"


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _inode_of(port: int, server_port: int) -> str | None:
    """The socket of a connection from one port to another, as the kernel lists it.

    Some clients, gRPC's among them, dial IPv4 addresses with sockets of IPv6.
    """
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, remote, *rest = line.split()
            if _port(local) == port and _port(remote) == server_port:
                return rest[6]
    return None


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process has; none where it is gone."""
    return set(_socket_inodes(Path(f"/proc/{pid}/fd")))


def _socket_inodes(directory: Path) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):  # a file, or the whole process, has gone meanwhile
        for name in os.listdir(directory):
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(directory / name)
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]
