"""The seam between the handoff protocol and whatever moves bytes.

A transport is used by one thread, the transfer thread. Reads only: the consumer pulls. A read is over when `poll`
reports it, and not before: where something else than this process writes the bytes, a posted read cannot be taken back.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvtransfer.block_memory import BlockMemory
from kvtransfer.ids import WorkerId


class TransportError(Exception):
    """A transport could not be set up, or a worker's descriptor could not be used."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockRead:
    """One posted read: source block i of the worker's pool goes to destination block i of ours."""

    read_id: int
    worker: WorkerId
    source: np.ndarray  # uint32[n] block ids in the worker's pool
    destination: np.ndarray  # uint32[n] block ids in our pool
    generations: np.ndarray  # uint64[n] as announced: a source that takes part in the read gives no other content

    def fits(self, num_source: int, num_destination: int) -> bool:
        """True when it has blocks, and all of them lie in pools of these sizes."""
        return (
            0 < self.source.size == self.destination.size == self.generations.size
            and int(self.source.max()) < num_source
            and int(self.destination.max()) < num_destination
        )


@dataclass(frozen=True, slots=True, eq=False)
class ReadEnd:
    """A read is over: nothing will land in its destination blocks any more."""

    read_id: int
    generations: np.ndarray | None  # uint64[n], looked at after the data; None: the read failed


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """What a transport may touch: the pool, and the generation word of each block."""

    blocks: BlockMemory
    generations: np.ndarray  # uint64[num_blocks], in host memory wherever the pool is


@dataclass(frozen=True, slots=True)
class Reach:
    """How reads of a worker would run."""

    one_sided: bool  # the worker's process has no part in them
    why: str  # for a person


class Transport(Protocol):
    """Registered with one `Memory` when it is made."""

    name: str

    def descriptor(self) -> bytes:
        """What a worker needs to read our memory. As good as a key to it: only for registered workers."""

    def reach(self, descriptor: bytes) -> Reach:
        """How reads of the worker with this descriptor would run; changes nothing. Raises TransportError."""

    def add_worker(self, worker: WorkerId, address: str, descriptor: bytes) -> None:
        """Makes a worker readable; again for the same worker is no change. Raises TransportError.

        address: host:port at which its process listens, for transports that have to connect to it.
        """

    def remove_worker(self, worker: WorkerId) -> None:
        """Forgets a worker: the next `poll` reports its open reads as failed, and their blocks are used again.

        Only for a worker whose process is seen to be gone, or from which no read is open: a read from a living worker,
        however unreachable, may still land. The worker may be added again.
        """

    def post(self, read: BlockRead) -> None:
        """Starts a read: first the data, then the generation words of the same blocks.

        A failure to post is reported by `poll`, like any other end.
        """

    def abandon(self, read_id: int) -> None:
        """Nobody wants this read any more; unknown ones change nothing.

        A transport that writes the bytes itself ends it: nothing lands from now on, and the next `poll` reports it as
        failed. Any other lets it run: its end is reported when it comes.
        """

    def poll(self) -> list[ReadEnd]:
        """Reads that ended since the last call; also lets workers' reads of our memory progress."""

    def close(self) -> None:
        """Ends it. Raises TransportError while a read is open: its bytes could still land."""
