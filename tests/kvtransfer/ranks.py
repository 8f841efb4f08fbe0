"""Pools of groups of ranks, in memory that other processes may map, and what must be in them.

What a rank's pool must hold is cut out of an array of heads and layers, not by `KvLayout.ranges_of`.
"""

import mmap
from dataclasses import dataclass, replace

import numpy as np

from kvtransfer.block_memory import GroupBlocks
from kvtransfer.layer_groups import LayerGroups
from kvtransfer.layout import KvLayout
from kvtransfer.transports.base import Memory
from tests.kvtransfer.kv_source import CANARY

NUM_BLOCKS = 6
NUM_BLOCKS_OF_READERS = 9  # another number: each side counts its own
PLAIN = KvLayout(num_layers=2, num_kv_heads=4, head_dim=8, block_size=4, dtype="bfloat16")
SLICES = LayerGroups((None, 5, 3), (((0, 1),), ((2, 3), (4, 5)), ((6,),)))
LAYOUTS = {
    **{f"{heads} heads": replace(PLAIN, num_kv_heads=heads) for heads in (4, 8, 3, 5, 7)},
    "one head": replace(PLAIN, num_kv_heads=1),
    "int8": replace(PLAIN, dtype="int8", token_scales=True),
    "e4m3, 7 tokens": replace(PLAIN, dtype="float8_e4m3fn", token_scales=True, block_size=7, head_dim=5),
    "latent": KvLayout(num_layers=3, num_kv_heads=1, head_dim=36, block_size=4, dtype="bfloat16", num_planes=1),
    "slices": replace(PLAIN, num_kv_heads=8, num_layers=SLICES.num_layers, groups=SLICES),
    "odd": replace(PLAIN, num_kv_heads=5, dtype="int8", block_size=3, head_dim=7, num_layers=3),
}


@dataclass(frozen=True)
class Rank:
    """The heads and layers of one rank."""

    heads: range
    layers: range


@dataclass(frozen=True)
class Ranks:
    """A group of ranks of a model."""

    layout: KvLayout
    ranks: tuple[Rank, ...]

    def new_memory(self, content: np.ndarray | None = None) -> Memory:
        """Each rank's pool is a mapping of its own. content: uint8[num_blocks, block_bytes]; None: canaries."""
        if content is None:
            content = np.full((NUM_BLOCKS_OF_READERS, self.layout.block_bytes), CANARY, dtype=np.uint8)
        pools = [_shared(cut) for cut in self.cut(content)]
        ranges = [self.layout.ranges_of(rank.heads, rank.layers) for rank in self.ranks]
        return Memory(GroupBlocks(pools, ranges), np.zeros(len(content), dtype=np.uint64))

    def new_part(self, mine: range, content: np.ndarray | None = None) -> Memory:
        """Pools of some ranks, as `new_memory` makes those of all. Generation words are where rank 0 is."""
        whole = self.new_memory(content)
        assert isinstance(whole.blocks, GroupBlocks)
        pools = [whole.blocks.pools[rank] for rank in mine]
        ranges = [whole.blocks.ranges[rank] for rank in mine]
        words = whole.generations if mine.start == 0 else np.zeros(0, dtype=np.uint64)
        return Memory(GroupBlocks(pools, ranges, self.layout.block_bytes), words)

    def cut(self, content: np.ndarray) -> list[np.ndarray]:
        """Each rank's own bytes of whole blocks, uint8[num_blocks, block_bytes]."""
        layout, num_blocks = self.layout, len(content)
        apart = content.reshape(num_blocks, layout.num_kv_heads, layout.num_layers, -1)
        return [
            apart[:, rank.heads.start : rank.heads.stop, rank.layers.start : rank.layers.stop].reshape(num_blocks, -1)
            for rank in self.ranks
        ]


def pools_of(memory: Memory) -> list[np.ndarray]:
    """What is in each rank's pool now."""
    assert isinstance(memory.blocks, GroupBlocks)
    return [pool.copy() for pool in memory.blocks.pools]


def by_heads(layout: KvLayout, size: int) -> Ranks:
    """Heads in equal shares, or as equal as they can be; where there are fewer than ranks, several have the same."""
    total, layers = layout.num_kv_heads, range(layout.num_layers)
    firsts = [rank * total // size for rank in range(size)]
    ends = [max((rank + 1) * total // size, firsts[rank] + 1) for rank in range(size)]
    return Ranks(layout, tuple(Rank(range(*each), layers) for each in zip(firsts, ends, strict=True)))


def by_stages(layout: KvLayout, size: int) -> Ranks:
    """Two stages of a pipeline, each of so many ranks that share its heads."""
    middle = layout.num_layers // 2
    of_heads = by_heads(layout, size).ranks
    stages = (range(middle), range(middle, layout.num_layers))
    return Ranks(layout, tuple(Rank(rank.heads, layers) for layers in stages for rank in of_heads))


def group(layout: KvLayout, name: str) -> Ranks:
    """So many ranks that share heads ("3"), or in each of two stages of a pipeline ("stages of 2")."""
    _, is_pipeline, size = name.rpartition("stages of ")
    return by_stages(layout, int(size)) if is_pipeline else by_heads(layout, int(size))


def some_content(layout: KvLayout, seed: int) -> np.ndarray:
    """Whole blocks of random bytes."""
    return np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, layout.block_bytes), dtype=np.uint8)


def _shared(content: np.ndarray) -> np.ndarray:
    pool = np.frombuffer(mmap.mmap(-1, content.nbytes), dtype=np.uint8).reshape(content.shape)
    pool[:] = content
    return pool
