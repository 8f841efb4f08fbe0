"""Block hashes are the same on every node, and name a whole prefix."""

from hashlib import blake2b

import numpy as np

from services.protocol.block_hash import block_hashes, root_hash
from services.protocol.contents import Namespace

ROOT = root_hash("model")


def hashes(*tokens: int) -> list[bytes]:
    return list(block_hashes(ROOT, np.array(tokens, np.int32), 2))


def test_the_hash_is_written_down():
    """BLAKE2b-128 over the parent's hash and the block's tokens as little-endian int32."""
    root = blake2b(b"model", digest_size=16).digest()
    first = blake2b(root + b"\x01\0\0\0\x02\0\0\0", digest_size=16).digest()
    second = blake2b(first + b"\x00\x01\0\0\xff\xff\xff\xff", digest_size=16).digest()
    assert hashes(1, 2, 256, -1) == [first, second]


def test_only_full_blocks_have_a_hash():
    assert hashes() == hashes(1) == []
    assert hashes(1, 2, 3) == hashes(1, 2)


def test_an_early_difference_changes_all_that_follow():
    assert not set(hashes(1, 2, 3, 4)) & set(hashes(9, 2, 3, 4))
    assert hashes(1, 2, 3, 4)[0] == hashes(1, 2, 9, 4)[0]


def test_namespaces_share_nothing():
    tokens = np.arange(8, dtype=np.int32)
    assert not set(block_hashes(ROOT, tokens, 2)) & set(block_hashes(root_hash("other"), tokens, 2))
    salted = [set(block_hashes(root_hash("model", Namespace(salt)), tokens, 2)) for salt in ("", "a", "b")]
    assert len(set().union(*salted)) == sum(map(len, salted))
    assert salted[0] == set(block_hashes(ROOT, tokens, 2))


def test_the_width_of_the_array_does_not_matter():
    tokens = np.arange(8)
    assert tokens.dtype == np.int64
    assert block_hashes(ROOT, tokens, 2) == block_hashes(ROOT, tokens.astype(np.int32), 2)
