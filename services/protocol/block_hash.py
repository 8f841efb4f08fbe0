"""Block hashes: names for a prefix that mean the same on every worker.

hash(block) = BLAKE2b-128(hash(parent) + the block's tokens as little-endian int32); the root is the hash of the
namespace, or a hash of the request's salt that is keyed by it. So a hash names a whole prefix, and a chain of hashes
can be searched from either end.
"""

from hashlib import blake2b
from typing import NewType, cast

import numpy as np

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16


def root_hash(namespace: str, salt: str = "") -> BlockHash:
    """Returns the parent of every first block in this namespace (a model's fingerprint), and with this salt."""
    root = blake2b(namespace.encode(), digest_size=HASH_BYTES).digest()
    return BlockHash(blake2b(salt.encode(), key=root, digest_size=HASH_BYTES).digest() if salt else root)


def child_hash(parent: BlockHash, block_tokens: bytes) -> BlockHash:
    """Returns the hash of the block with these tokens (little-endian int32) below `parent`."""
    return BlockHash(blake2b(parent + block_tokens, digest_size=HASH_BYTES).digest())


def block_hashes(root: BlockHash, token_ids: np.ndarray, block_size: int) -> list[BlockHash]:
    """Returns the hashes of all full blocks of `token_ids` (int32[n]), first block first."""
    raw = token_ids.astype("<i4", copy=False).tobytes()
    step = block_size * 4
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(raw) - step + 1, step):  # does `child_hash` without a call for each block
        parent = cast(BlockHash, blake2b(parent + raw[start : start + step], digest_size=HASH_BYTES).digest())
        hashes.append(parent)
    return hashes
