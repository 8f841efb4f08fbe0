"""The prefix trie stays a tree: whoever enters a block, and how often."""

import numpy as np
import pytest

from services.engine.prefix_cache import NO_BLOCK, PrefixCache


def tokens_of(*values: int) -> np.ndarray:
    """A block of two tokens for each value."""
    return np.array([[value, value] for value in values], dtype=np.int32)


def family() -> PrefixCache:
    """Block 0 with the children 1, 2 and 3, and 4 below 1; all ready but 3."""
    trie = PrefixCache(6, 2)
    trie.insert([NO_BLOCK, 0, 0, 1], [0, 1, 2, 4], tokens_of(10, 11, 12, 14), pending=False)
    trie.insert([0], [3], tokens_of(13), pending=True)
    return trie


def test_a_block_that_two_sequences_share_is_entered_once():
    """In one call and in two; it is announced once."""
    trie = family()
    trie.take_events()
    assert trie.insert([1, 1], [5, 5], tokens_of(15, 15), pending=False) == {}
    assert trie.insert([1], [5], tokens_of(15), pending=False) == {}
    assert len(trie.take_events()) == 1
    assert sorted(trie.subtree(1)) == [1, 4, 5]


def test_a_block_whose_content_another_one_has_is_its_twin():
    """Ready or pending; what lies below the twin is not entered, and the rest of the call is."""
    trie = family()
    assert trie.insert([0, 5], [5, 4], tokens_of(12, 1), pending=True) == {0: 2}
    assert trie.insert([0, 2], [5, 5], tokens_of(13, 1), pending=False) == {0: 3}
    assert trie.ancestors(5) == [2, 0]


def test_a_block_is_entered_at_one_place_only():
    with pytest.raises(AssertionError):
        family().insert([2], [4], tokens_of(14), pending=False)


def test_a_ready_block_below_a_pending_one_is_refused():
    with pytest.raises(AssertionError):
        family().insert([3], [5], tokens_of(15), pending=False)
