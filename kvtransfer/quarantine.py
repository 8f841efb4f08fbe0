"""Quarantine: destination blocks of reads whose end is unknown.

A posted read cannot be taken back, whatever became of its request: its data may land minutes later. So the blocks of an
abandoned read are out of use until the transport reports the read's end. It also reports the reads of a producer whose
process is seen to be gone (`kvtransfer.process`). A producer that cannot be reached ends no read: a firewall refuses
connections to the living.

Blocks of a read whose end is never reported stay out of use until their worker starts afresh.
"""

from dataclasses import dataclass

from kvtransfer.ids import WorkerId
from kvtransfer.transports.base import BlockRead

_MAX_SHARE = 0.1  # of the pool
_SETTLE_S = 5.0  # an abandoned read usually ends within milliseconds: younger ones do not count for the share
_MAX_AGE_S = 600.0


@dataclass(frozen=True, slots=True)
class _AbandonedRead:
    producer: WorkerId
    blocks: tuple[int, ...]  # ids in our pool
    since: float


class Quarantine:
    """Blocks out of use, by the abandoned read that may still write to them."""

    def __init__(self) -> None:
        self._reads: dict[int, _AbandonedRead] = {}

    def add(self, read: BlockRead, now: float) -> tuple[int, ...]:
        """Takes the destination blocks of an abandoned read out of use, and returns them."""
        blocks: tuple[int, ...] = tuple(read.destination.tolist())
        self._reads[read.read_id] = _AbandonedRead(read.worker, blocks, now)
        return blocks

    def end(self, read_id: int) -> tuple[int, ...]:
        """Returns the blocks of a read that ended, for use again; none where it was not in quarantine."""
        read = self._reads.pop(read_id, None)
        return read.blocks if read else ()

    @property
    def num_blocks(self) -> int:
        """Blocks out of use."""
        return sum(len(read.blocks) for read in self._reads.values())

    @property
    def producers(self) -> set[WorkerId]:
        """Producers from which an abandoned read is open: not to be paired with now."""
        return {read.producer for read in self._reads.values()}

    def why_start_afresh(self, now: float, pool_blocks: int) -> str | None:
        """Says, for a person, why a worker with such a pool cannot go on with this quarantine; None: it can."""
        if not self._reads:
            return None
        settled = sum(len(read.blocks) for read in self._reads.values() if now - read.since >= _SETTLE_S)
        if settled > pool_blocks * _MAX_SHARE:
            return f"{settled} of {pool_blocks} KV blocks are in quarantine, for more than {_SETTLE_S:g} s"
        if now - min(read.since for read in self._reads.values()) >= _MAX_AGE_S:
            return f"KV blocks are in quarantine for more than {_MAX_AGE_S:g} s"
        return None
