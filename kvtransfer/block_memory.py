"""A pool of KV blocks in memory: the seam between transports and host or device memory.

Reads and writes never wait for a model's steps. A producer announces a block when the step that wrote it is known to be
complete, so a reader finds the block whole. A consumer's steps use a block only after the end of its read was reported,
and that is not before `write` has returned.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np


class BlockMemory(Protocol):
    """A pool of equal blocks, one after the other without a gap. Any thread may use it."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    @property
    def address(self) -> int:
        """Address of block 0. Does not change."""

    @property
    def device(self) -> int | None:
        """CUDA device of the pool, as this process counts devices. None: host memory."""

    def bind_thread(self) -> None:
        """Makes the pool's device current on this thread, for libraries that use `address` on this thread."""

    def read(self, blocks: np.ndarray, start: int, end: int) -> bytes:
        """Copies bytes `start` to `end` of these blocks (uint32[n]), laid end to end."""

    def write(self, blocks: np.ndarray, start: int, data: bytes) -> None:
        """Writes data into these blocks (uint32[n]), laid end to end, from byte `start` on, before it returns."""


class HostBlocks:
    """Blocks in host memory: an array, whose bytes are the pool."""

    device: int | None = None

    def __init__(self, array: np.ndarray) -> None:
        """array: uint8[num_blocks, block_bytes], contiguous; its address must not change."""
        assert array.dtype == np.uint8
        assert array.flags.c_contiguous
        self.array = array
        self.num_blocks, self.block_bytes = array.shape
        self._flat = array.reshape(-1).data

    @property
    def address(self) -> int:
        """See `BlockMemory.address`."""
        return self.array.ctypes.data

    def bind_thread(self) -> None:
        """Does nothing: every thread has host memory."""

    def read(self, blocks: np.ndarray, start: int, end: int) -> bytes:
        """See `BlockMemory.read`."""
        return b"".join(self._flat[there] for there, _ in spans(blocks, self.block_bytes, start, end))

    def write(self, blocks: np.ndarray, start: int, data: bytes) -> None:
        """See `BlockMemory.write`."""
        source = memoryview(data)
        for there, here in spans(blocks, self.block_bytes, start, start + len(data)):
            self._flat[there] = source[here]


def spans(blocks: np.ndarray, block_bytes: int, start: int, end: int) -> Iterator[tuple[slice, slice]]:
    """Yields, for each block of bytes `start` to `end`, the slice of the pool and the slice of these bytes."""
    at = start
    while at < end:
        index, inside = divmod(at, block_bytes)
        num_bytes = min(block_bytes - inside, end - at)
        in_pool = int(blocks[index]) * block_bytes + inside
        yield slice(in_pool, in_pool + num_bytes), slice(at - start, at - start + num_bytes)
        at += num_bytes
