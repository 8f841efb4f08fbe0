"""Quarantine: destination blocks of reads whose end is unknown.

A posted read cannot be taken back, whatever became of its request: its data may land minutes later. So its blocks are
out of use until the transport reports the read's end.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QuarantinedRead:
    """An open read that nobody wants any more."""

    producer: int  # incarnation
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
    def producers(self) -> set[int]:
        """Peers whose reads are not known to be over: not to be paired with now."""
        return {read.producer for read in self._reads.values()}

    def oldest_since(self) -> float | None:
        """When the oldest entry came in."""
        return min((read.since for read in self._reads.values()), default=None)
