"""The transport of a worker whose memory is in several processes: each of them reads what it has room for.

        read ─▶ GroupTransport ─┬▶ own transport      own bytes of each block, then the generation words
                                ├▶ RemoteTransport    bytes of part 1, then the words
                                └▶ ...

A read ends when it has ended in all processes: before that something may land somewhere. It fails once, where any of
them failed. Each process reads the words after its own bytes, so words that are everywhere as announced prove all.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvtransfer.ids import WorkerId
from kvtransfer.transports.base import BlockRead, Reach, ReadEnd, Transport, TransportError
from kvtransfer.transports.parts import PartOffer, join_parts
from kvtransfer.transports.remote import RemoteTransport


@dataclass(slots=True, eq=False)
class _OpenRead:
    """A read that has not ended everywhere."""

    read: BlockRead
    num_open: int  # processes
    words: np.ndarray | None = None  # of the processes where it has ended: one that is not as announced, if any
    failed: bool = False


class GroupTransport:
    """The transports of one kind of all processes of a worker, as one. Used by one thread."""

    def __init__(self, own: Transport, others: Sequence[RemoteTransport]) -> None:
        """own: of this process, which has part 0. others: of the further parts, in order."""
        self.name = own.name
        self._own, self._others = own, tuple(others)
        self._all: tuple[Transport, ...] = own, *others
        self._workers: set[WorkerId] = set()
        self._open: dict[int, _OpenRead] = {}

    def descriptor(self) -> bytes:
        """Packs those of all parts."""
        return join_parts([PartOffer("", self._own.descriptor()), *(other.offer for other in self._others)])

    def reach(self, descriptor: bytes) -> Reach:
        """Tells how the slowest of the processes would read."""
        return Reach.of_all([transport.reach(descriptor) for transport in self._all])

    def add_worker(self, worker: WorkerId, address: str, descriptor: bytes) -> None:
        """Makes a worker readable in all processes, or in none. Raises TransportError."""
        if worker in self._workers:
            return
        tried: list[Transport] = []
        try:
            for transport in self._all:
                tried.append(transport)
                transport.add_worker(worker, address, descriptor)
        except TransportError:
            for transport in tried:  # the last one too: it may have added the worker, and answered too late
                with suppress(TransportError):  # of a process that is lost, which `poll` tells
                    transport.remove_worker(worker)
            raise
        self._workers.add(worker)

    def remove_worker(self, worker: WorkerId) -> None:
        """Removes a worker everywhere. Its open reads end when all processes have removed it."""
        if worker in self._workers:
            self._workers.remove(worker)
            for transport in self._all:
                transport.remove_worker(worker)

    def post(self, read: BlockRead) -> None:
        """Starts a read in all processes."""
        self._open[read.read_id] = _OpenRead(read, len(self._all))
        for transport in self._all:
            transport.post(read)

    def abandon(self, read_id: int) -> None:
        """Abandons a read everywhere."""
        if read_id in self._open:
            for transport in self._all:
                transport.abandon(read_id)

    def set_pace(self, poll_s: float) -> None:
        """See `Transport.set_pace`."""
        for transport in self._all:
            transport.set_pace(poll_s)

    def poll(self) -> list[ReadEnd]:
        """Returns the reads that have ended everywhere. Raises TransportError where a process is lost."""
        ends = []
        for transport in self._all:
            for end in transport.poll():
                self._ended_in_one(end)
                found = self._open[end.read_id]
                if not found.num_open:
                    del self._open[end.read_id]
                    ends.append(ReadEnd(end.read_id, None if found.failed else found.words))
        return ends

    def close(self) -> None:
        """Closes the transports of all processes. Raises TransportError while a read is open."""
        if self._open:
            raise TransportError(f"{len(self._open)} reads are open")
        for transport in self._all:
            transport.close()

    def _ended_in_one(self, end: ReadEnd) -> None:
        found = self._open[end.read_id]
        found.num_open -= 1
        if end.generations is None:
            if not found.failed and found.num_open:
                self.abandon(end.read_id)  # nobody needs what the others read
            found.failed = True
        elif found.words is None:
            found.words = end.generations
        else:
            found.words = np.where(found.words == found.read.generations, end.generations, found.words)
