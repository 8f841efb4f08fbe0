"""Open reads: posted, and their end not reported. A read is of use to its handoff, or abandoned and in quarantine."""

from dataclasses import dataclass
from itertools import count

import numpy as np

from kvtransfer.ids import AttemptId, WorkerId
from kvtransfer.quarantine import Quarantine
from kvtransfer.transports.base import BlockRead


@dataclass(frozen=True, slots=True)
class OpenRead:
    """A read of consecutive blocks of one handoff."""

    id: AttemptId
    start: int  # index of its first block among the handoff's
    read: BlockRead

    @property
    def end(self) -> int:
        """The index after its last block."""
        return self.start + self.read.source.size


class OpenReads:
    """All open reads of a consumer, and the quarantine of those that were abandoned."""

    def __init__(self) -> None:
        self.quarantine = Quarantine()
        self._reads: dict[int, OpenRead] = {}
        self._ids = count(1)

    def __len__(self) -> int:
        return len(self._reads)

    def post(
        self, id: AttemptId, start: int, producer: WorkerId, blocks: list[int], generations: list[int], to: list[int]
    ) -> BlockRead:
        """Makes the read of a handoff's blocks from index `start` on, to the blocks `to` of our pool."""
        read = BlockRead(
            next(self._ids),
            producer,
            np.array(blocks, dtype=np.uint32),
            np.array(to, dtype=np.uint32),
            np.array(generations, dtype=np.uint64),
        )
        self._reads[read.read_id] = OpenRead(id, start, read)
        return read

    def abandon(self, read_id: int, now: float) -> tuple[int, ...]:
        """Puts the destination blocks of a read into quarantine, and returns them."""
        return self.quarantine.add(self._reads[read_id].read, now)

    def end(self, read_id: int) -> OpenRead:
        """Takes out a read that ended."""
        return self._reads.pop(read_id)
