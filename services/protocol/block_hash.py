"""Block hashes: names for a prefix that mean the same on every worker.

    top of a model       BLAKE2b-128(fingerprint)
    root of a namespace  the top; with a salt BLAKE2b-128(salt), with an adapter BLAKE2b-128(both), keyed by the top
    block                BLAKE2b-128(hash of its parent + its token ids as little-endian int32), keyed by its mark

A first block's parent is a root. A block in which media begin has a mark, which names them (contents.py); others have
an empty key, which is none. So a hash names a whole prefix and where it may be used, and a chain of hashes can be
searched from either end. Whoever names blocks does it with these functions: `block_names` all blocks of a sequence at
once, the others one after the other.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import NewType, cast

import numpy as np

from services.protocol.contents import COMMON, NO_MARKS, Contents, Namespace, with_length

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16


def block_names(fingerprint: str, namespace: Namespace, contents: Contents, block_size: int) -> list[BlockHash]:
    """Returns the hashes of all full blocks of a sequence, first block first."""
    return block_hashes(root_hash(fingerprint, namespace), contents.token_ids, block_size, contents.marks(block_size))


def root_hash(fingerprint: str, namespace: Namespace = COMMON) -> BlockHash:
    """Returns the parent of every first block in this namespace of the models with this fingerprint."""
    return namespace_hash(top_hash(fingerprint), namespace)


def top_hash(fingerprint: str) -> BlockHash:
    """Returns what all names of a model's blocks are derived from."""
    return BlockHash(blake2b(fingerprint.encode(), digest_size=HASH_BYTES).digest())


def namespace_hash(top: BlockHash, namespace: Namespace) -> BlockHash:
    """Returns the parent of every first block in this namespace, for a model with this `top_hash`."""
    salt = namespace.salt.encode()
    if namespace.adapter:
        both = with_length(salt) + with_length(namespace.adapter.encode())
        return BlockHash(blake2b(both, key=top, digest_size=HASH_BYTES, person=b"baton adapter").digest())
    return BlockHash(blake2b(salt, key=top, digest_size=HASH_BYTES).digest()) if salt else top


def child_hash(parent: BlockHash, block_tokens: bytes, mark: bytes = b"") -> BlockHash:
    """Returns the hash of the block with these tokens (little-endian int32) and this mark below `parent`."""
    return BlockHash(blake2b(parent + block_tokens, key=mark, digest_size=HASH_BYTES).digest())


def block_hashes(
    root: BlockHash, token_ids: np.ndarray, block_size: int, marks: Mapping[int, bytes] = NO_MARKS
) -> list[BlockHash]:
    """Returns the hashes of all full blocks of `token_ids` (int32[n]) below a root, first block first."""
    raw = token_ids.astype("<i4", copy=False).tobytes()
    step = block_size * 4
    hashes: list[BlockHash] = []
    parent = root
    if marks:
        for index in range(len(raw) // step):
            parent = child_hash(parent, raw[index * step : (index + 1) * step], marks.get(index, b""))
            hashes.append(parent)
        return hashes
    for start in range(0, len(raw) - step + 1, step):  # does `child_hash` without a call for each block
        parent = cast(BlockHash, blake2b(parent + raw[start : start + step], digest_size=HASH_BYTES).digest())
        hashes.append(parent)
    return hashes
