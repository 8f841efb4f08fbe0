"""Workers whose ranks are in several processes: part 0 in the test's, each other one in a process of its own."""

import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvtransfer.transports.base import Memory, Transport
from kvtransfer.transports.group import GroupTransport
from kvtransfer.transports.part_messages import ChannelLostError
from kvtransfer.transports.part_server import PartServer
from kvtransfer.transports.remote import PartLink
from tests.forkserver import FORKSERVER
from tests.kvtransfer.kv_source import make_end, new_worker_id
from tests.kvtransfer.ranks import Ranks, pools_of

SALT = 1  # of the generations that `block_read` asks for
DEADLINE_S = 300.0
_LENGTH = struct.Struct("<I")


class SocketChannel:
    """A `MessageChannel` over a connected socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()

    def send(self, parts: Sequence[bytes]) -> None:
        with self._sending:
            try:
                self._socket.sendall(b"".join((_LENGTH.pack(sum(map(len, parts))), *parts)))
            except OSError as error:
                raise ChannelLostError(str(error)) from error

    def receive(self) -> bytearray:
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return self._take(length)

    def close(self) -> None:
        with suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _take(self, length: int) -> bytearray:
        taken = bytearray()
        while len(taken) < length:
            try:
                data = self._socket.recv(length - len(taken))
            except OSError as error:
                raise ChannelLostError(str(error)) from error
            if not data:
                raise ChannelLostError("the other end has closed")
            taken += data
        return taken


class PartProcess:
    """A process that has a part of one worker after the other."""

    def __init__(self) -> None:
        self.pipe, theirs = FORKSERVER.Pipe()
        self.process = FORKSERVER.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def become(self, *arguments: Any) -> SocketChannel:
        """Makes the part, and returns the channel to it. arguments: see `_Part`."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.pipe.send((listening.getsockname(), arguments))
            listening.settimeout(DEADLINE_S)
            return SocketChannel(listening.accept()[0])

    def pools(self) -> list[np.ndarray]:
        """What is in the pools of its ranks."""
        self.pipe.send("pools")
        assert self.pipe.poll(DEADLINE_S), "a part does not answer"
        pools: list[np.ndarray] = self.pipe.recv()
        return pools

    def end(self) -> None:
        """Ends the part, whose channel is closed."""
        self.pipe.send("end")
        assert self.pipe.poll(DEADLINE_S), "a part does not end"
        assert self.pipe.recv() == "ended"

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(DEADLINE_S)
        assert self.process.exitcode == 0


class _Part:
    """A part of a worker, and the thread that drives its transport."""

    def __init__(
        self, address: Any, kind: str, worker: int, ranks: Ranks, mine: range, part: int, content: np.ndarray | None
    ) -> None:
        self.memory = ranks.new_part(mine, content)
        self.end = make_end(kind, worker, self.memory, part)  # type: ignore[arg-type]
        self.channel = SocketChannel(socket.create_connection(address))
        server = PartServer(self.channel, {kind: (self.end.transport, self.end.address)})
        self.thread = threading.Thread(target=server.run)
        self.thread.start()


def _serve(pipe: Connection) -> None:
    part: _Part | None = None
    while (asked := pipe.recv()) is not None:
        if asked == "pools":
            assert part is not None
            pipe.send(pools_of(part.memory))
        elif asked == "end":
            assert part is not None
            part.thread.join()
            part.channel.close()
            part.end.close()
            pipe.send("ended")
        else:
            part = _Part(asked[0], *asked[1])


def shares(num_ranks: int, num_parts: int) -> list[range]:
    """The ranks of each part."""
    return [range(part * num_ranks // num_parts, (part + 1) * num_ranks // num_parts) for part in range(num_parts)]


class Group:
    """A worker of several parts. Without further processes it is one of none."""

    def __init__(
        self, kind: str, ranks: Ranks, processes: Sequence[PartProcess], content: np.ndarray | None = None
    ) -> None:
        """content: of whole blocks, whose generations then tell it; None: canaries."""
        self.worker, self.processes = new_worker_id(), processes
        mine, *theirs = shares(len(ranks.ranks), 1 + len(processes))
        self.memory: Memory = ranks.new_part(mine, content)
        if content is not None:
            self.memory.generations[:] = np.arange(len(content)) + 1000 * SALT
        self.end = make_end(kind, self.worker, self.memory)
        self.links = [
            PartLink(part, process.become(kind, self.worker, ranks, own, part, content))
            for part, (process, own) in enumerate(zip(processes, theirs, strict=True), 1)
        ]
        self.transport: Transport = self.end.transport
        if processes:
            for link in self.links:
                link.hello(DEADLINE_S)
            self.transport = GroupTransport(self.end.transport, [link.transport(kind) for link in self.links])
        self.transport.set_pace(0.0005)

    def pools(self) -> list[np.ndarray]:
        """What is in the pool of each rank."""
        return pools_of(self.memory) + [pool for process in self.processes for pool in process.pools()]

    def close(self) -> None:
        self.transport.close()
        for link in self.links:
            link.close()
        for process in self.processes:
            process.end()
        self.end.close()
