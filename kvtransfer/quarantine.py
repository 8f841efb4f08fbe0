"""Quarantine: destination blocks of reads whose end is unknown.

A posted read cannot be taken back, whatever became of its request: its data may land minutes later. So its blocks are
out of use until the transport reports the read's end, which it does as well for a producer whose process is seen to
be gone (`kvtransfer.process`). That a producer cannot be reached ends nothing: a firewall refuses connections to the
living.

Where neither comes, the blocks stay out of use until their worker starts afresh.
"""

from dataclasses import dataclass

from kvtransfer.ids import WorkerId

_MAX_SHARE = 0.1  # of the pool
_SETTLE_S = 5.0  # a read that is given up is usually over within milliseconds: younger ones do not count for the share
_MAX_AGE_S = 600.0


@dataclass(frozen=True, slots=True)
class QuarantinedRead:
    """An open read that nobody wants any more."""

    producer: WorkerId
    blocks: tuple[int, ...]
    since: float


class Quarantine:
    """Blocks out of use, by the read that may still write to them."""

    def __init__(self) -> None:
        self._reads: dict[int, QuarantinedRead] = {}

    def add(self, read_id: int, read: QuarantinedRead) -> None:
        """From now on these blocks are out of use."""
        self._reads[read_id] = read

    def end(self, read_id: int) -> tuple[int, ...]:
        """The read is over: its blocks, for use again. Empty where it was not in quarantine."""
        read = self._reads.pop(read_id, None)
        return read.blocks if read else ()

    @property
    def num_blocks(self) -> int:
        """Blocks out of use."""
        return sum(len(read.blocks) for read in self._reads.values())

    @property
    def producers(self) -> set[WorkerId]:
        """Producers whose reads are not known to be over: not to be paired with now."""
        return {read.producer for read in self._reads.values()}

    def why_start_afresh(self, now: float, pool_blocks: int) -> str | None:
        """Why a worker with such a pool cannot go on with what is in quarantine, for a person; None: it can."""
        if not self._reads:
            return None
        settled = sum(len(read.blocks) for read in self._reads.values() if now - read.since >= _SETTLE_S)
        if settled > pool_blocks * _MAX_SHARE:
            return f"{settled} of {pool_blocks} KV blocks are in quarantine, for more than {_SETTLE_S:g} s"
        if now - min(read.since for read in self._reads.values()) >= _MAX_AGE_S:
            return f"KV blocks are in quarantine for more than {_MAX_AGE_S:g} s"
        return None
