"""Lists of memory as NIXL takes them: the rows that describe a pool or generation words, and the entries of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvtransfer.regions import Region

PAGE_WORDS = 512  # generation words are read in pages of 4 KiB: about as fast as one word
_WORD_BYTES = 8


class Kind(StrEnum):
    """NIXL's words for kinds of memory."""

    HOST = "DRAM"
    DEVICE = "VRAM"


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """The memory that an address belongs to."""

    kind: Kind = Kind.HOST
    device: int = 0  # NIXL's number; host memory has number 0

    @classmethod
    def of(cls, device: int | None) -> "MemoryPlace":
        """Returns that of a CUDA device; None: host memory."""
        return cls() if device is None else cls(Kind.DEVICE, device)


HOST = MemoryPlace()


def block_rows(cuts: Sequence[Region], num_blocks: int, place: MemoryPlace) -> np.ndarray:
    """Describes a pool by one strided row for each cut: uint64[cuts, 5] of address, length, device, stride, count."""
    rows = [(each.address, each.num_bytes, place.device, each.stride, num_blocks) for each in cuts]
    return np.array(rows, dtype=np.uint64)


def entries(blocks: np.ndarray, num_blocks: int, num_cuts: int) -> np.ndarray:
    """Returns int[num_cuts * n], the entries of blocks (uint32[n]) in a list of these cuts: cut by cut, since NIXL
    merges entries that follow each other in memory.
    """
    if num_cuts == 1:
        return blocks
    first = np.arange(0, num_cuts * num_blocks, num_blocks)
    found: np.ndarray = (first[:, None] + blocks).reshape(-1)
    return found


def page_rows(address: int, num_words: int) -> np.ndarray:
    """Describes generation words by page, the last one shorter: uint64[1 or 2, 5], columns as of `block_rows`."""
    full, rest = divmod(num_words, PAGE_WORDS)
    page_bytes, rest_bytes = PAGE_WORDS * _WORD_BYTES, rest * _WORD_BYTES
    rows = [
        (address, page_bytes, HOST.device, page_bytes, full),
        (address + full * page_bytes, rest_bytes, HOST.device, rest_bytes, 1),
    ]
    return np.array([row for row in rows if row[1] and row[4]], dtype=np.uint64)
