"""Parts and slices of blocks: what of a block is memory, and what of it a sequence needs.

The pool's memory is in slices. A part of a block is some of its slices, which are allocated, referenced and freed
together. `WholeBlocks` are one part and one slice each. Where layers have different windows, a block has a part for
each group of layers (`sliced_parts.py`), and a sequence needs only the parts that its next token sees:

    unseen    int64[G], of each group of layers after the first: how many leading blocks of a sequence have no part
"""

import numpy as np

_NO_GROUPS = np.zeros(0, dtype=np.int64)  # after the first


class WholeBlocks:
    """Blocks whose part and whose slice is the block itself."""

    rows: np.ndarray | None = None  # int32[blocks, S], where the slices of each block are; None: it is its own slice
    slices_per_block = 1

    def unseen(self, positions: int | np.ndarray) -> np.ndarray:
        """Returns `unseen` for the token at a position, int64[G], or for those at int[N] positions, int64[N, G]."""
        return _NO_GROUPS

    def referenced(self, blocks: np.ndarray, unseen: np.ndarray) -> np.ndarray:
        """Returns the parts that a sequence with int32[n] blocks references, int32[m]."""
        return blocks

    def passed(self, table: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Returns the parts of a sequence's blocks that it needs no longer once `unseen` is `after` and not `before`.

        table: int32[n], the sequence's blocks. Returns int32[m].
        """
        return table[:0]

    def num_slices(self, num_blocks: int, unseen: np.ndarray) -> int:
        """Counts the slices of a sequence's first num_blocks blocks."""
        return num_blocks

    def num_whole(self, num_slices: int, unseen: np.ndarray) -> int:
        """Counts the leading blocks that so many leading slices of a sequence fill."""
        return num_slices

    def slices_of(self, blocks: np.ndarray, first_index: int, unseen: np.ndarray) -> np.ndarray:
        """Returns the slices of a sequence's int32[n] blocks, from its block first_index on, block by block."""
        return blocks

    def parts_with(self, slices: np.ndarray) -> np.ndarray:
        """Returns the parts, each once, of the blocks that these slices belong to."""
        return slices

    def copies(self, source: int, destination: int) -> list[tuple[int, int]]:
        """Returns the slices to copy, and where to, for a copy of a whole block."""
        return [(source, destination)]
