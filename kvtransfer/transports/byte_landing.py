"""Reads over byte streams, as their reader sees them: bytes that arrive go into the pool until the read is over.

A read has one stream for each part of its producer that has bytes for it. Where part 0 alone has, its stream ends with
the generation words. Else the words are asked of part 0 when all other streams have ended, so that they are newer than
all data.
"""

from collections import deque
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from kvtransfer.block_memory import BlockBytes
from kvtransfer.transports.base import BlockRead


class Landing:
    """One stream of a read. The stream's thread and the transfer thread both use it.

    Once `end` has returned, nothing of it lands any more.
    """

    def __init__(self, read: BlockRead, blocks: BlockBytes | None, ended: "deque[Landing]", *, words: bool) -> None:
        """blocks: that the bytes go to; None: none come. ended: gets the landing once it is over.

        words: that generation words come, after the bytes.
        """
        self.read, self.has_words = read, words
        self.generations: np.ndarray | None = None  # once it is over: as of `end`
        self._blocks = blocks
        self._num_bytes = 0 if blocks is None else read.destination.size * blocks.block_bytes
        self._arrived = 0
        self._ended = ended
        self._over = False
        self._lock = Lock()

    @property
    def wanted(self) -> bool:
        """See `ByteSink.wanted`."""
        return not self._over

    @property
    def is_complete(self) -> bool:
        """Returns True where all bytes have arrived."""
        return self._arrived == self._num_bytes

    def take(self, data: bytes) -> bool:
        """See `ByteSink.take`."""
        with self._lock:
            if self._over or self._blocks is None or self._arrived + len(data) > self._num_bytes:
                return False
            self._blocks.write(self.read.destination, self._arrived, data)
            self._arrived += len(data)
            return True

    def end(self, generations: np.ndarray | None) -> None:
        """See `ByteSink.end`."""
        with self._lock:
            if not self._over:
                self._over = True
                self.generations = generations
                self._ended.append(self)


@dataclass(slots=True, eq=False)
class LandingRead:
    """A read, and its streams. The transfer thread alone uses it."""

    read: BlockRead
    landings: list[Landing] = field(default_factory=list)  # that are not over
    words: np.ndarray | None = None  # uint64[n]
    is_complete: bool = True  # all bytes of the streams that are over have arrived
    failed: bool = False

    def fail(self) -> None:
        """Ends all streams."""
        self.failed = True
        for landing in self.landings:
            landing.end(None)

    def landing_ended(self, landing: Landing) -> None:
        """Takes in the end of a stream."""
        self.landings.remove(landing)
        self.is_complete = self.is_complete and landing.is_complete
        if landing.generations is None:
            self.fail()
        elif landing.has_words:
            self.words = landing.generations

    @property
    def lacks_words(self) -> bool:
        """Returns True where all data is here, and the words are to be asked for."""
        return not self.landings and not self.failed and self.words is None

    def result(self) -> np.ndarray | None:
        """Returns the words of a read that is over; None: it failed, or bytes of these words are missing."""
        words = self.words
        if self.failed or words is None or words.size != self.read.generations.size:
            return None
        return words if self.is_complete or not np.array_equal(words, self.read.generations) else None
