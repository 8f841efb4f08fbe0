"""The shape of paged KV, and the fingerprint that says which KV caches are interchangeable.

One tensor holds everything: [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim], K before V. So a block is
one contiguous piece of memory (one descriptor to move it), a range of heads is contiguous inside a block, and so is one
head's K tile of one layer.
"""

import json
from dataclasses import dataclass
from hashlib import blake2b

LAYOUT_VERSION = 1
KV_PROTOCOL_VERSION = 2

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of one block."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # token positions
    dtype: str  # "float32", "bfloat16", "float16" or "float8_e4m3fn"

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """Shape of a pool of `num_blocks` blocks."""
        return (num_blocks, self.num_kv_heads, self.num_layers, 2, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, K and V."""
        per_token = self.num_kv_heads * self.num_layers * 2 * self.head_dim
        return per_token * self.block_size * _ITEM_BYTES[self.dtype]

    def bytes_of(self, heads: range) -> range:
        """Returns the bytes of a block that hold these KV heads, all layers, K and V.

        A rank of a model has blocks of its own KV heads, which have the order of these bytes.
        """
        assert heads.step == 1, heads
        assert 0 <= heads.start <= heads.stop <= self.num_kv_heads, (heads, self.num_kv_heads)
        each = self.block_bytes // self.num_kv_heads
        return range(heads.start * each, heads.stop * each)


def fingerprint(
    layout: KvLayout, weights_id: str, rope: dict[str, object], precision: dict[str, object] | None = None
) -> str:
    """Digest of all that makes two KV caches interchangeable: 32 hex digits.

    weights_id names the weights, rope the rotary parameters as the model uses them. precision names all else that
    decides how values were rounded, such as quantised weights and the scales of FP8 KV.
    """
    parts = {
        **({"precision": precision} if precision else {}),
        "layout_version": LAYOUT_VERSION,
        "weights": weights_id,
        "rope": rope,
        **{name: getattr(layout, name) for name in KvLayout.__slots__},
    }
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
