"""The local prefix cache of a model whose layers have different windows: a node may have lost parts of its block.

A node always has the first part of its block. The later ones are lost when the pool needs their room: then the node's
block can still be above a hit, but not among the last ones that the window of such a group of layers sees.

    cached blocks of a prompt     0 1 2 3 4 5 6 7
    first part                    x x x x x x x x
    of a window of 2 blocks       . . . . x x x .      the hit has 7 blocks: its next token sees blocks 5 and 6
"""

import numpy as np

from services.engine.blocks.prefix_cache import Match, PrefixCache
from services.engine.blocks.sliced_parts import SlicedBlocks
from services.protocol.contents import COMMON, Contents, Namespace


class SlicedCache(PrefixCache):
    """A trie of cached blocks, which looks at the parts that they have."""

    def __init__(self, parts: SlicedBlocks, block_size: int) -> None:
        super().__init__(parts.num_ids, block_size)
        self._parts = parts

    def match(self, contents: Contents, namespace: Namespace = COMMON, position: int | None = None) -> Match:
        """Finds the longest ready prefix with all parts that the token at `position` sees.

        position: None for the one after the prefix.
        """
        match = super().match(contents, namespace)
        num_blocks = self._num_usable(match.blocks, position)
        return match if num_blocks == len(match.blocks) else Match(match.blocks[:num_blocks])

    def parts_changed(self) -> None:
        """Notes that nodes have other parts than before."""
        self._changed()

    def _num_usable(self, blocks: np.ndarray, position: int | None) -> int:
        """Counts the leading blocks of the longest usable prefix of a chain of ready nodes."""
        depths = np.arange(len(blocks) + 1)
        positions = depths * self.block_size if position is None else np.full_like(depths, position)
        unseen = self._parts.unseen(positions)
        usable = np.ones(len(depths), dtype=np.bool_)
        for group, has in enumerate(self._parts.has):
            last_lost = np.full(len(depths), -1)  # among the blocks before each depth
            np.maximum.accumulate(np.where(has[blocks], -1, depths[:-1]), out=last_lost[1:])
            usable &= last_lost < unseen[:, group]
        return int(np.flatnonzero(usable)[-1])
