"""Groups of layers by attention window, and slices: the layers of a group that share one piece of memory.

Where the layers of a model have different windows, they need the KV of different tokens: one with a window of 512
tokens needs nothing of what lies further back. So a block of a sequence is not one piece of memory but several slices,
each of so many layers of one group, and the slices of a group are freed on their own. All slices are of one size, so
that the memory which one group frees serves any other.

    layers of a model     0 1 2 3 4 [5] 6 7 8 9 10 [11]        in brackets: those without a window
    groups                [5 11]    0 1 2 3 4 6 7 8 9 10
    slices of 2 layers    [5 11]    0 1   2 3   4 6   7 8   9 10

The first group is the one with the widest window, or with none: a sequence keeps its slices as long as its blocks. Two
workers that exchange KV agree on all of this: it is in the fingerprint.
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

_MOST_UNUSED = 0.1  # of a model's layers: places for layers in slices that are not full


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The slices of a model's layers, one group after the other."""

    windows: tuple[int | None, ...]  # of each group: positions that a token sees, its own included; None: all
    slices: tuple[tuple[tuple[int, ...], ...], ...]  # by group: the layers of each slice

    @property
    def num_layers(self) -> int:
        """Layers for which a slice has room."""
        return max(len(layers) for group in self.slices for layers in group)

    @property
    def num_slices(self) -> int:
        """Slices of one block."""
        return sum(self.sizes)

    @property
    def in_order(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each slice, in the order of slices in block tables."""
        return tuple(layers for group in self.slices for layers in group)

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """Each layer's slice, and its place in that."""
        slices = enumerate(self.in_order)
        return {layer: (number, at) for number, layers in slices for at, layer in enumerate(layers)}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Slices of one block in each group."""
        return tuple(map(len, self.slices))

    @property
    def later_windows(self) -> tuple[int, ...]:
        """Windows of the groups after the first."""
        return tuple(window for window in self.windows[1:] if window is not None)

    def unseen(self, positions: int | np.ndarray, block_size: int) -> np.ndarray:
        """Counts the leading blocks of which the token at a position sees nothing, in each group after the first.

        positions: one, or int[N]. Returns int64[G], or int64[N, G].
        """
        windows = np.array(self.later_windows, dtype=np.int64)
        seen_from = np.asarray(positions, dtype=np.int64)[..., None] - windows + 1
        blocks: np.ndarray = np.maximum(seen_from, 0) // block_size
        return blocks

    def num_in(self, num_blocks: int, unseen: np.ndarray) -> int:
        """Counts the slices of a sequence's first num_blocks blocks, where each group after the first has none of its
        first unseen[g] blocks.
        """
        later = sum(size * max(0, num_blocks - int(n)) for size, n in zip(self.sizes[1:], unseen, strict=True))
        return self.sizes[0] * num_blocks + later

    def num_whole(self, num_slices: int, unseen: np.ndarray) -> int:
        """Counts the leading blocks that so many slices fill: the opposite of `num_in`."""
        most = range(num_slices // self.sizes[0] + 1)
        return bisect_right(most, num_slices, key=lambda num_blocks: self.num_in(num_blocks, unseen)) - 1

    def described(self) -> dict[str, object]:
        """Returns all of it by names, for digests."""
        return {"windows": self.windows, "slices": self.slices}


def divide_layers(windows: tuple[int | None, ...]) -> LayerGroups | None:
    """Divides a model's layers, which have these windows. None: all have the same one, or there are no layers.

    The slices are as large as they can be with at most a tenth of the layers' number of places unused: each of them is
    work for a step.
    """
    distinct = sorted(set(windows), key=lambda window: (window is not None, -(window or 0)))
    if len(distinct) < 2:
        return None
    groups = [[layer for layer, own in enumerate(windows) if own == window] for window in distinct]
    size = max(
        size
        for size in range(1, min(map(len, groups)) + 1)
        if sum(-len(group) % size for group in groups) <= _MOST_UNUSED * len(windows)
    )
    return LayerGroups(tuple(distinct), tuple(_cut(group, size) for group in groups))


def _cut(layers: list[int], size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(layers[start : start + size]) for start in range(0, len(layers), size))
