"""Regions: the addresses at which the bytes of blocks lie, where a block is in several pieces of memory.

A worker's blocks are whole ones: all KV heads and layers of its model. Where the worker is a group of ranks, each rank
has a pool of its own, with the heads and layers that the rank computes:

    a block          head 0 | head 1 | head 2 | head 3          two ranks: two regions
    rank 0's pool    head 0 | head 1                            start 0, end 2 heads, stride 2 heads
    rank 1's pool                      head 2 | head 3          start 2 heads, end 4 heads, stride 2 heads

Regions cover a block together. They overlap where several ranks have the same head: whoever reads takes one of these
regions, whoever writes writes to all of them.

Ranks may be in several processes that do not share memory, on several hosts: each process has a part of every block.
The regions of all parts together cover a block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes `start` to `end` of every block: those of block b lie at `address + b * stride`."""

    address: int
    stride: int
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one block that lie here."""
        return self.end - self.start

    def part(self, start: int, end: int) -> "Region":
        """Returns the region of bytes `start` to `end` of every block, which lie in this one."""
        assert self.start <= start < end <= self.end, (self, start, end)
        return Region(self.address + start - self.start, self.stride, start, end)


def one_region(address: int, block_bytes: int) -> tuple[Region, ...]:
    """Returns the regions of a pool whose blocks lie whole, one after the other without a gap."""
    return (Region(address, block_bytes, 0, block_bytes),)


def cover(regions: Sequence[Region], block_bytes: int) -> tuple[Region, ...]:
    """Returns regions that have each byte of a block once, in its order: of several, the first that has a byte.

    Raises ValueError where no region has a byte, or one reaches beyond the block.
    """
    return tuple(region for _, region in cover_by([regions], block_bytes))


def cover_by(parts: Sequence[Sequence[Region]], block_bytes: int, first: int = 0) -> list[tuple[int, Region]]:
    """Returns such regions where the bytes of a block lie in several parts, each with the number of its part.

    Where several parts have a byte, it is taken from part `first`, or the next one in a circle that has it. Raises
    ValueError as `cover`.
    """
    order = [(first + number) % len(parts) for number in range(len(parts))]
    every = [(number, region) for number in order for region in parts[number]]
    if any(not 0 <= region.start < region.end <= block_bytes for _, region in every):
        raise ValueError(f"regions that are not in a block of {block_bytes} bytes")
    found: list[tuple[int, Region]] = []
    at = 0
    while at < block_bytes:
        there = next(((number, region) for number, region in every if region.start <= at < region.end), None)
        if there is None:
            raise ValueError(f"no region has byte {at} of a block of {block_bytes}")
        number, region = there
        found.append((number, region.part(at, region.end)))
        at = region.end
    return found


def cut(local: Sequence[Region], remote: Sequence[Region], block_bytes: int) -> list[tuple[Region, Region]]:
    """Cuts blocks at the borders of both sides' regions: returns pairs of regions of the same bytes, to be read into
    and to be read from.

    Each byte comes once for each local region that has it, out of one remote region. Raises ValueError as `cover`.
    """
    return cut_by(local, [remote], block_bytes)[0]


def cut_by(
    local: Sequence[Region], parts: Sequence[Sequence[Region]], block_bytes: int, first: int = 0
) -> list[list[tuple[Region, Region]]]:
    """Returns such pairs where the bytes to be read lie in several parts, for each part; `first` as of `cover_by`.

    The local regions may be those of one part as well. Raises ValueError as `cover`.
    """
    pairs: list[list[tuple[Region, Region]]] = [[] for _ in parts]
    source = cover_by(parts, block_bytes, first)
    for region in local:
        for number, other in source:
            start, end = max(region.start, other.start), min(region.end, other.end)
            if start < end:
                pairs[number].append((region.part(start, end), other.part(start, end)))
    return pairs


def ranges_of(regions: Iterable[Region]) -> tuple[range, ...]:
    """Returns the bytes of a block that regions have, each once, in the block's order."""
    found: list[range] = []
    for region in sorted(regions, key=lambda region: region.start):
        if found and region.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, region.end))
        else:
            found.append(range(region.start, region.end))
    return tuple(found)


def areas(regions: Sequence[Region], block_bytes: int, start: int, end: int) -> list[tuple[int, int]]:
    """Returns the memory, as addresses and numbers of bytes, that has bytes `start` to `end` of blocks laid end to end,
    from block 0 on.

    An area has what lies between its blocks too. Areas that overlap, as those of regions in one pool, are one.
    """
    found: list[tuple[int, int]] = []
    for first, last in sorted(_area(region, block_bytes, start, end) for region in regions if start < end):
        if found and first < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        elif first < last:
            found.append((first, last))
    return [(first, last - first) for first, last in found]


def _area(region: Region, block_bytes: int, start: int, end: int) -> tuple[int, int]:
    """Returns the address of the first byte, and the one behind the last."""
    block, first = divmod(start, block_bytes)
    last_block, last = divmod(end - 1, block_bytes)
    return (
        region.address + block * region.stride + _clamped(first - region.start, region.num_bytes),
        region.address + last_block * region.stride + _clamped(last + 1 - region.start, region.num_bytes),
    )


def _clamped(inside: int, num_bytes: int) -> int:
    return min(max(inside, 0), num_bytes)
