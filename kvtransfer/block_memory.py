"""Where a pool of KV blocks lies: the seam between transports and host or device memory.

Nobody here waits for the steps of a model, and nobody has to. A block is announced when the step that wrote it is
known to be complete, so who reads it finds it whole; what lands is used by steps that are launched after the read's end
was reported, and that is not before `write` has returned.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np


class BlockMemory(Protocol):
    """A pool of equal blocks, one after the other without a gap. Any thread may use it."""

    @property
    def num_blocks(self) -> int:
        """Their number."""

    @property
    def block_bytes(self) -> int:
        """The size of each."""

    @property
    def address(self) -> int:
        """Of block 0. Does not change."""

    @property
    def device(self) -> int | None:
        """The CUDA device that it lies in, as this process counts them. None: host memory."""

    def bind_thread(self) -> None:
        """Makes the device current on this thread, for libraries that use `address` from it."""

    def read(self, blocks: np.ndarray, start: int, end: int) -> bytes:
        """Bytes `start` to `end` of these blocks (uint32[n]), laid end to end. A copy."""

    def write(self, blocks: np.ndarray, start: int, data: bytes) -> None:
        """Puts data into these blocks (uint32[n]), laid end to end, from byte `start` on. It is there on return."""


class HostBlocks:
    """Blocks in host memory: an array, whose bytes are the pool."""

    device: int | None = None

    def __init__(self, array: np.ndarray) -> None:
        """array: uint8[num_blocks, block_bytes], contiguous; it stays where it is."""
        assert array.dtype == np.uint8
        assert array.flags.c_contiguous
        self.array = array
        self.num_blocks, self.block_bytes = array.shape
        self._flat = array.reshape(-1).data

    @property
    def address(self) -> int:
        """See BlockMemory."""
        return self.array.ctypes.data

    def bind_thread(self) -> None:
        """Host memory is there for every thread."""

    def read(self, blocks: np.ndarray, start: int, end: int) -> bytes:
        """See BlockMemory."""
        return b"".join(self._flat[there] for there, _ in spans(blocks, self.block_bytes, start, end))

    def write(self, blocks: np.ndarray, start: int, data: bytes) -> None:
        """See BlockMemory."""
        source = memoryview(data)
        for there, here in spans(blocks, self.block_bytes, start, start + len(data)):
            self._flat[there] = source[here]


def spans(blocks: np.ndarray, block_bytes: int, start: int, end: int) -> Iterator[tuple[slice, slice]]:
    """Where bytes `start` to `end` of these blocks lie: in the pool, and among these bytes. One pair for each block."""
    at = start
    while at < end:
        index, inside = divmod(at, block_bytes)
        num_bytes = min(block_bytes - inside, end - at)
        in_pool = int(blocks[index]) * block_bytes + inside
        yield slice(in_pool, in_pool + num_bytes), slice(at - start, at - start + num_bytes)
        at += num_bytes
