"""Blocks whose layers have different windows: a block is a row of slices, and has a part for each group of layers.

    part g * num_ids + b      the slices of block b and group g; part b is that of the first group

`kvtransfer/layer_groups.py` says which layers are in each slice. A block exists while its first part does; its later
parts come and go.
"""

import numpy as np

from kvtransfer.layer_groups import LayerGroups
from services.engine.blocks.parts import WholeBlocks


class SlicedBlocks(WholeBlocks):
    """Blocks of several parts: where their slices are, and which parts there are."""

    rows: np.ndarray

    def __init__(self, num_slices: int, block_size: int, groups: LayerGroups) -> None:
        self.groups = groups
        self.slices_per_block = groups.num_slices
        self.num_ids = num_slices // groups.sizes[0]  # of blocks: each has the slices of its first part
        self.sizes = np.array(groups.sizes)  # slices of a part, by group
        self.rows = np.zeros((self.num_ids, groups.num_slices), dtype=np.int32)  # 0: the slice is not there
        # By group after the first, and by block, with a node or without.
        self.has = np.zeros((len(groups.later_windows), self.num_ids), dtype=np.bool_)
        self.part_of = np.zeros(num_slices, dtype=np.int32)  # by slice; meaningful while the slice is not free
        self._block_size = block_size
        ends = np.cumsum(self.sizes).tolist()
        self.columns = [slice(end - size, end) for end, size in zip(ends, groups.sizes, strict=True)]  # by group
        self.group_of = np.repeat(np.arange(len(ends)), self.sizes)  # of each column

    def unseen(self, positions: int | np.ndarray) -> np.ndarray:
        """See `WholeBlocks.unseen`."""
        return self.groups.unseen(positions, self._block_size)

    def referenced(self, blocks: np.ndarray, unseen: np.ndarray) -> np.ndarray:
        """See `WholeBlocks.referenced`: part by part, group by group."""
        later = [blocks[n:] + g * self.num_ids for g, n in enumerate(unseen.tolist(), start=1)]
        return np.concatenate([blocks, *later]).astype(np.int32)

    def passed(self, table: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """See `WholeBlocks.passed`."""
        borders = enumerate(zip(before.tolist(), after.tolist(), strict=True), start=1)
        return np.concatenate([table[start:end] + g * self.num_ids for g, (start, end) in borders]).astype(np.int32)

    def num_slices(self, num_blocks: int, unseen: np.ndarray) -> int:
        """See `WholeBlocks.num_slices`."""
        return self.groups.num_in(num_blocks, unseen)

    def num_whole(self, num_slices: int, unseen: np.ndarray) -> int:
        """See `WholeBlocks.num_whole`."""
        return self.groups.num_whole(num_slices, unseen)

    def slices_of(self, blocks: np.ndarray, first_index: int, unseen: np.ndarray) -> np.ndarray:
        """See `WholeBlocks.slices_of`."""
        slices: np.ndarray = self.rows[blocks][self.wanted(len(blocks), unseen - first_index)]
        return slices

    def parts_with(self, slices: np.ndarray) -> np.ndarray:
        """See `WholeBlocks.parts_with`."""
        blocks = np.unique(self.part_of[slices] % self.num_ids)
        later = [blocks[has[blocks]] + g * self.num_ids for g, has in enumerate(self.has, start=1)]
        return np.concatenate([blocks, *later]).astype(np.int32)

    def copies(self, source: int, destination: int) -> list[tuple[int, int]]:
        """See `WholeBlocks.copies`."""
        return list(zip(self.rows[source].tolist(), self.rows[destination].tolist(), strict=True))

    def part(self, group: int, block: int) -> int:
        """Returns a part of one block."""
        return group * self.num_ids + block

    def wanted(self, count: int, unseen: np.ndarray) -> np.ndarray:
        """Tells which slices the first `count` blocks of a sequence have, as bool[count, S]."""
        wanted: np.ndarray = np.arange(count)[:, None] >= np.concatenate([[0], unseen])[self.group_of]
        return wanted

    def fill(self, blocks: np.ndarray, wanted: np.ndarray, slices: np.ndarray) -> np.ndarray:
        """Gives int32[n] new blocks their slices, as bool[n, S] says, one after the other; returns the part of each."""
        rows = np.zeros(wanted.shape, dtype=np.int32)
        rows[wanted] = slices
        self.rows[blocks] = rows
        parts: np.ndarray = (blocks[:, None] + self.group_of * self.num_ids)[wanted]
        self.part_of[slices] = parts
        self.has[:, blocks] = wanted[:, [columns.start for columns in self.columns[1:]]].T
        return parts

    def move(self, group: int, source: int, destination: int) -> None:
        """Makes a part of one block that of another, which lacks it. group: not the first."""
        columns = self.columns[group]
        self.rows[destination, columns] = self.rows[source, columns]
        self.rows[source, columns] = 0
        self.part_of[self.rows[destination, columns]] = self.part(group, destination)
        self.has[group - 1, [source, destination]] = False, True

    def empty(self, group: int, blocks: np.ndarray) -> np.ndarray:
        """Takes the slices of a group from int32[n] blocks that have them; returns the slices, int32[m]."""
        columns = self.columns[group]
        slices: np.ndarray = self.rows[blocks, columns].reshape(-1)
        self.rows[blocks, columns] = 0
        if group:
            self.has[group - 1, blocks] = False
        return slices
