"""A pool of KV blocks in memory: the seam between transports and host or device memory.

Reads and writes never wait for a model's steps. A producer announces a block when the step that wrote it is known to be
complete, so a reader finds the block whole. A consumer's steps use a block only after the end of its read was reported,
and that is not before `write` has returned.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from kvtransfer.regions import Region, cover, one_region, ranges_of


class BlockBytes(Protocol):
    """The bytes of equal blocks. Any thread may use them."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    def read(self, blocks: np.ndarray, start: int, end: int) -> bytes:
        """Copies bytes `start` to `end` of these blocks (uint32[n]), laid end to end."""

    def write(self, blocks: np.ndarray, start: int, data: bytes | memoryview) -> None:
        """Writes data into these blocks (uint32[n]), laid end to end, from byte `start` on, before it returns."""


class BlockMemory(BlockBytes, Protocol):
    """A pool of equal blocks, whole or in pieces."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """The addresses of the blocks' bytes; they do not change. Together they cover a block, or a part of it where
        the rest is in other processes.
        """

    @property
    def device(self) -> int | None:
        """CUDA device of the pool, as this process counts devices. None: host memory."""

    def bind_thread(self) -> None:
        """Makes the pool's device current on this thread, for libraries that use addresses on this thread."""


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
    def regions(self) -> tuple[Region, ...]:
        """See `BlockMemory.regions`. There is one."""
        return one_region(self.array.ctypes.data, self.block_bytes)

    def bind_thread(self) -> None:
        """Does nothing: every thread has host memory."""

    def read(self, blocks: np.ndarray, start: int, end: int) -> bytes:
        """See `BlockMemory.read`."""
        return b"".join(self._flat[there] for there, _ in spans(blocks, self.block_bytes, start, end))

    def write(self, blocks: np.ndarray, start: int, data: bytes | memoryview) -> None:
        """See `BlockMemory.write`."""
        source = memoryview(data)
        for there, here in spans(blocks, self.block_bytes, start, start + len(data)):
            self._flat[there] = source[here]


class GroupBlocks:
    """Blocks of a group of ranks, made of the ranks' pools, which are in host memory of this process.

    Whole blocks; or, where ranks are in other processes too, the bytes of them that the ranks of this one have.
    """

    device: int | None = None

    def __init__(
        self, pools: Sequence[np.ndarray], ranges: Sequence[Sequence[range]], block_bytes: int | None = None
    ) -> None:
        """pools: of each rank, uint8[num_blocks, bytes of its block], contiguous; their addresses must not change.

        ranges: of each rank, the bytes of a whole block that its block consists of, in order (`KvLayout.ranges_of`).
        block_bytes: of a whole block of which other processes may have some; None: these ranks have all of it, and
        ValueError is raised where none of them has a byte.
        """
        assert len({len(pool) for pool in pools}) == 1, "the ranks' pools have as many blocks"
        self.pools, self.ranges = tuple(pools), tuple(map(tuple, ranges))
        self.num_blocks = len(pools[0])
        self.block_bytes = block_bytes or max(each.stop for own in ranges for each in own)
        self.regions = tuple(each for pool, own in zip(pools, ranges, strict=True) for each in _regions(pool, own))
        once = cover(self.regions, self.block_bytes) if block_bytes is None else _once(self.regions)
        self._read_from = [_piece(region, pools) for region in once]
        self._written_to = [_piece(region, pools) for region in self.regions]

    def bind_thread(self) -> None:
        """Does nothing: every thread has host memory."""

    def read(self, blocks: np.ndarray, start: int, end: int) -> bytes:
        """See `BlockMemory.read`. Of bytes that other processes have, nothing: `RangesOf` names those that are here."""
        return b"".join([memory[there] for memory, there, _ in self._spans(self._read_from, blocks, start, end)])

    def write(self, blocks: np.ndarray, start: int, data: bytes | memoryview) -> None:
        """See `BlockMemory.write`. Every rank that has a byte gets it."""
        source = memoryview(data)
        for memory, there, here in self._spans(self._written_to, blocks, start, start + len(data)):
            memory[there] = source[here]

    def _spans(
        self, pieces: "Sequence[_Piece]", blocks: np.ndarray, start: int, end: int
    ) -> Iterator[tuple[memoryview, slice, slice]]:
        """Yields, for each piece of each block of bytes `start` to `end`, its slice of a pool and of these bytes."""
        for index in range(start // self.block_bytes, -(-end // self.block_bytes)):
            block, whole = int(blocks[index]), index * self.block_bytes
            for region, memory, at in pieces:
                first, last = max(region.start, start - whole), min(region.end, end - whole)
                if first < last:
                    there = at + block * region.stride + first - region.start
                    here = whole + first - start
                    yield memory, slice(there, there + last - first), slice(here, here + last - first)


class _Piece(NamedTuple):
    """A region of a group's blocks, and the pool that it is in."""

    region: Region
    memory: memoryview  # the pool's bytes
    at: int  # of these, the first one of block 0's


def _regions(pool: np.ndarray, ranges: Sequence[range]) -> Iterator[Region]:
    """Yields the regions of one rank's pool. Ranges that lie beside each other in the whole block are one."""
    assert pool.dtype == np.uint8
    assert pool.flags.c_contiguous
    stride = pool.shape[1]
    assert sum(map(len, ranges)) == stride, f"a rank's block has {stride} bytes"
    at = first = 0
    for number, own in enumerate(ranges):
        assert own.step == 1, own
        at += len(own)
        if number + 1 == len(ranges) or ranges[number + 1].start != own.stop:
            yield Region(pool.ctypes.data + first, stride, own.stop - (at - first), own.stop)
            first = at


def _once(regions: Sequence[Region]) -> list[Region]:
    """Returns regions that have each byte once that any of these has."""
    found: list[Region] = []
    for own in ranges_of(regions):
        inside = [_moved(each, -own.start) for each in regions if each.start in own]
        found += [_moved(each, own.start) for each in cover(inside, len(own))]
    return found


def _moved(region: Region, by: int) -> Region:
    return replace(region, start=region.start + by, end=region.end + by)


def _piece(region: Region, pools: Sequence[np.ndarray]) -> _Piece:
    [pool] = [pool for pool in pools if 0 <= region.address - pool.ctypes.data < pool.nbytes]
    return _Piece(region, pool.reshape(-1).data, region.address - pool.ctypes.data)


def spans(blocks: np.ndarray, block_bytes: int, start: int, end: int) -> Iterator[tuple[slice, slice]]:
    """Yields, for each block of bytes `start` to `end`, the slice of the pool and the slice of these bytes."""
    at = start
    while at < end:
        index, inside = divmod(at, block_bytes)
        num_bytes = min(block_bytes - inside, end - at)
        in_pool = int(blocks[index]) * block_bytes + inside
        yield slice(in_pool, in_pool + num_bytes), slice(at - start, at - start + num_bytes)
        at += num_bytes
