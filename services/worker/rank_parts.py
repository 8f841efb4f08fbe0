"""The KV of a worker of several hosts: each rank has a part of every block, and transports that rank 0 drives.

rank 0                                             a rank above 0
TransferThread ─▶ GroupTransport ─▶ PartLink ════ RankChannel ════ PartServer ─▶ its transports, RankPort
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from kvtransfer.block_memory import BlockMemory
from kvtransfer.transports.base import Memory
from kvtransfer.transports.byte_stream import BlockSource, ByteStreamTransport
from kvtransfer.transports.part_messages import ChannelLostError
from kvtransfer.transports.part_server import PartServer, wait_for_begin
from services.config import TransportName
from services.engine.runner.group.connection import Connection, ConnectionLostError
from services.worker.rank_port import RankPort
from services.worker.transports import make_transports

_MOST_BYTES = 64 << 20  # of a message: a read of some million blocks

log = structlog.get_logger()


class RankChannel:
    """`MessageChannel` over the connection for KV between rank 0 and another rank."""

    def __init__(self, connection: Connection) -> None:
        connection.most_bytes = _MOST_BYTES
        self._connection = connection

    def send(self, parts: Sequence[bytes]) -> None:
        """See `MessageChannel.send`."""
        try:
            self._connection.send(parts)
        except ConnectionLostError as error:
            raise ChannelLostError(str(error)) from error

    def receive(self) -> bytearray:
        """See `MessageChannel.receive`."""
        try:
            return self._connection.receive()
        except ConnectionLostError as error:
            raise ChannelLostError(str(error)) from error

    def close(self) -> None:
        """See `MessageChannel.close`."""
        self._connection.close()


@dataclass(frozen=True, slots=True, eq=False)
class RankPart:
    """The part of a rank above 0."""

    rank: int
    blocks: BlockMemory  # the bytes of every block that the rank has
    port: RankPort
    address: str  # host:port at which consumers reach the port

    def serve(self, connection: Connection, on_fatal: Callable[[str], None]) -> threading.Thread:
        """Serves it, on a thread that is returned, until rank 0 has closed the connection.

        on_fatal: called there with a reason, in words, where the part can be served no longer.
        """

        def run() -> None:
            try:
                self._run(RankChannel(connection))
            except Exception as error:
                log.error("the transports of this rank failed", reason=str(error), exc_info=error)
                on_fatal(f"the transports of this rank failed: {error}")

        thread = threading.Thread(target=run, name="transfer", daemon=True)
        thread.start()
        return thread

    def _run(self, channel: RankChannel) -> None:
        if (begin := wait_for_begin(channel)) is None:
            return
        source = BlockSource(begin.worker, Memory(self.blocks, np.zeros(0, dtype=np.uint64)))
        made = make_transports(TransportName(begin.transport), self.rank)(source, self.port.dial)
        self.port.read_from(source)
        addresses = {ByteStreamTransport.name: self.address}  # readers of others connect to what a descriptor says
        PartServer(channel, {each.name: (each, addresses.get(each.name, "")) for each in made}).run()
