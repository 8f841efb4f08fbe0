"""The shape of paged KV, and the fingerprint that says which KV caches are interchangeable.

One tensor holds everything: [num_blocks, num_kv_heads, num_layers, num_planes, block_size, head_dim]. So a block is one
contiguous piece of memory (one descriptor to move it), a range of heads is contiguous inside a block, and so is one
head's plane of one layer: its K, or its V after it. Latent KV (multi-head latent attention, DeepSeek-V2, arXiv
2405.04434) has one head and one plane: a token's latent, from which all heads' K and V are computed, and after it the
part of K that is rotated.

With `token_scales` a number is a code of one byte, and each token has one scale in each plane, by which its codes are
multiplied. The scales of a plane, float32[block_size], lie behind its codes, so they are part of the block: whoever
copies or hands over a block does so with its scales. A scale belongs to one token, since a block is filled token by
token: a scale of the whole block would grow, and all codes before would have to be rounded again.
"""

import json
from dataclasses import dataclass, replace
from hashlib import blake2b

from kvtransfer.layer_groups import LayerGroups

LAYOUT_VERSION = 1
KV_PROTOCOL_VERSION = 2

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
_SCALE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of one block, or of a slice of one where layers have different windows."""

    num_layers: int  # of the model, or places for layers in a slice
    num_kv_heads: int
    head_dim: int  # numbers of a token in one plane
    block_size: int  # token positions
    dtype: str  # "float32", "bfloat16", "float16", "float8_e4m3fn" or "int8"
    num_planes: int = 2  # K and V; 1: latent KV
    groups: LayerGroups | None = None  # None: a block is one piece of memory, with all layers
    token_scales: bool = False  # of a dtype of one byte: each plane has a scale for each token

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """Returns the shape of a pool of `num_blocks` blocks: [.., block_size, head_dim].

        With `token_scales` the last number is head_dim + 4. A plane then is no matrix of such rows: it has block_size *
        head_dim codes, then block_size * 4 bytes of scales.
        """
        width = self.head_dim + (_SCALE_BYTES if self.token_scales else 0)
        return (num_blocks, self.num_kv_heads, self.num_layers, self.num_planes, self.block_size, width)

    @property
    def num_slices(self) -> int:
        """Pieces of memory that a whole block has."""
        return 1 if self.groups is None else self.groups.num_slices

    @property
    def token_elements(self) -> int:
        """Numbers of one token in one piece of memory, all its layers and planes."""
        return self.num_kv_heads * self.num_layers * self.num_planes * self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one piece of memory, all its layers and planes."""
        scales = self.num_kv_heads * self.num_layers * self.num_planes * _SCALE_BYTES if self.token_scales else 0
        return self.token_elements * _ITEM_BYTES[self.dtype] + scales

    @property
    def plane_bytes(self) -> int:
        """Bytes of one head's K, or V, of one layer in a block: those of its scales included."""
        return self.block_bytes // (self.num_kv_heads * self.num_layers * self.num_planes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one piece of memory: a block, or a slice of one."""
        return self.token_bytes * self.block_size

    def bytes_of(self, heads: range) -> range:
        """Returns the bytes of a piece of memory that hold these KV heads, all its layers and planes.

        A rank of a model has blocks of its own KV heads, which have the order of these bytes. Latent KV has one head,
        so each rank has all of it.
        """
        assert heads.step == 1, heads
        assert 0 <= heads.start <= heads.stop <= self.num_kv_heads, (heads, self.num_kv_heads)
        each = self.block_bytes // self.num_kv_heads
        return range(heads.start * each, heads.stop * each)

    def ranges_of(self, heads: range, layers: range | None = None) -> tuple[range, ...]:
        """Returns the bytes of a block that a rank with these KV heads and layers has, in the order of its own block.

        layers: None: all. Of fewer layers it is one range for each head. Layers of `groups` lie in slices, which are
        not divided so.
        """
        if layers is None or layers == range(self.num_layers):
            return (self.bytes_of(heads),)
        assert self.groups is None, "layers of a slice are not divided among ranks"
        assert layers.step == 1, layers
        assert 0 <= layers.start <= layers.stop <= self.num_layers, (layers, self.num_layers)
        each = self.num_planes * self.plane_bytes
        firsts = (self.bytes_of(range(head, head + 1)).start for head in heads)
        return tuple(range(first + layers.start * each, first + layers.stop * each) for first in firsts)

    def part(self, heads: range, layers: range | None = None) -> "KvLayout":
        """Returns the layout of the block of a rank with these KV heads and layers."""
        assert layers is None or self.groups is None or layers == range(self.num_layers), "layers of a slice"
        num_layers = self.num_layers if layers is None else len(layers)
        return replace(self, num_kv_heads=len(heads), num_layers=num_layers)


def fingerprint(
    layout: KvLayout, weights_id: str, rope: dict[str, object], precision: dict[str, object] | None = None
) -> str:
    """Digest of all that makes two KV caches interchangeable: 32 hex digits.

    weights_id names the weights, rope the rotary parameters as the model uses them. precision names all else that
    decides how values were rounded, such as quantised weights and the scales of FP8 KV.
    """
    geometry = {name: getattr(layout, name) for name in KvLayout.__slots__}
    if layout.num_planes == 2:
        del geometry["num_planes"]  # digests of earlier versions, which knew nothing else, stay valid
    if not layout.token_scales:
        del geometry["token_scales"]
    del geometry["groups"]
    if layout.groups is not None:
        geometry |= layout.groups.described()
    parts = {
        **({"precision": precision} if precision else {}),
        "layout_version": LAYOUT_VERSION,
        "weights": weights_id,
        "rope": rope,
        **geometry,
    }
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
