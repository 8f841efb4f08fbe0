"""The seam between the handoff protocol and the transports that move bytes.

One thread uses a transport, the transfer thread. A transport only reads: the consumer pulls. A read is over when `poll`
reports its end, and not before: where the bytes are not written by this process, a posted read cannot be taken back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvtransfer.block_memory import BlockMemory
from kvtransfer.ids import WorkerId


class TransportError(Exception):
    """A transport could not be set up, or a worker's descriptor could not be used."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockRead:
    """One posted read: block source[i] of a producer's pool goes to block destination[i] of the reader's pool."""

    read_id: int
    worker: WorkerId  # the producer
    source: np.ndarray  # uint32[n] block ids in the producer's pool
    destination: np.ndarray  # uint32[n] block ids in the reader's pool
    generations: np.ndarray  # uint64[n] as announced: a producer that sends the bytes itself sends no other content

    def fits(self, num_source: int, num_destination: int) -> bool:
        """True when the read has blocks, and all of them lie in pools of these numbers of blocks."""
        return (
            0 < self.source.size == self.destination.size == self.generations.size
            and int(self.source.max()) < num_source
            and int(self.destination.max()) < num_destination
        )


@dataclass(frozen=True, slots=True, eq=False)
class ReadEnd:
    """The end of a read: nothing lands in its destination blocks any more."""

    read_id: int
    generations: np.ndarray | None  # uint64[n], read after the data; None: the read failed
    transport: str = ""  # its name; empty: none read anything
    why: str = ""  # the reason for this transport and no other, for people


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Memory that a transport may touch: the pool, and the generation word of each block.

    Of a worker of several processes each has the memory of its part (`kvtransfer/transports/parts.py`).
    """

    blocks: BlockMemory
    generations: np.ndarray  # uint64[num_blocks], in host memory wherever the pool is; [0]: of a part above 0


@dataclass(frozen=True, slots=True)
class Reach:
    """The way in which reads of a worker would run."""

    one_sided: bool  # without help of the worker's process
    why: str  # for the log
    possible: bool = True  # at all; False: `why` says why not

    @classmethod
    def of_all(cls, reaches: "Sequence[Reach]") -> "Reach":
        """Returns how a read runs that is made of such reads."""
        worst = min(reaches, key=lambda reach: (reach.possible, reach.one_sided))
        return cls(all(reach.one_sided for reach in reaches), worst.why, worst.possible)


class Transport(Protocol):
    """A way to read other workers' blocks into one `Memory`, which it registers when it is made."""

    name: str

    def descriptor(self) -> bytes:
        """Packs what other workers need to read this memory. It is as good as a key: only for registered workers."""

    def reach(self, descriptor: bytes) -> Reach:
        """Tells how reads of the worker with this descriptor would run; changes nothing. Raises TransportError."""

    def add_worker(self, worker: WorkerId, address: str, descriptor: bytes) -> None:
        """Makes a worker readable; a second call for the same worker changes nothing. Raises TransportError.

        address: host:port at which the worker listens, for transports that connect to it.
        """

    def remove_worker(self, worker: WorkerId) -> None:
        """Removes a worker: the next `poll` reports its open reads as failed, and their blocks are used again.

        The worker's process must be seen to be gone, or no read of the worker be open: a read of a living worker, even
        of one that cannot be reached, may still land. The worker may be added again.
        """

    def post(self, read: BlockRead) -> None:
        """Starts a read: first the data, then the generation words of the same blocks.

        `poll` reports a failure to post, as it reports any other end.
        """

    def abandon(self, read_id: int) -> None:
        """Abandons a read, for which nobody waits any more. An unknown id changes nothing.

        A transport that writes the bytes itself ends the read: nothing lands from now on, and the next `poll` reports
        the read as failed. Any other transport lets the read run, and reports its end when it comes.
        """

    def set_pace(self, poll_s: float) -> None:
        """Learns in which intervals `poll` is called from now on."""

    def poll(self) -> list[ReadEnd]:
        """Returns the ends of reads since the last call; also lets other workers' reads of this memory progress."""

    def close(self) -> None:
        """Closes the transport. Raises TransportError while a read is open: its bytes could still land."""
