"""The prefix trie stays a tree: whoever enters a block, and how often."""

from collections.abc import Callable

import numpy as np
import pytest

from services.engine.blocks.prefix_cache import NO_BLOCK, PrefixCache


def tokens_of(*values: int) -> np.ndarray:
    """A block of two tokens for each value."""
    return np.array([[value, value] for value in values], dtype=np.int32)


def family() -> PrefixCache:
    """Block 0 with the children 1, 2 and 3, and 4 below 1; all ready but 3."""
    trie = PrefixCache(6, 2)
    trie.insert([NO_BLOCK, 0, 0, 1], [0, 1, 2, 4], tokens_of(10, 11, 12, 14), pending=False)
    trie.insert([0], [3], tokens_of(13), pending=True)
    trie.check()
    return trie


def test_a_block_that_two_sequences_share_is_entered_once():
    """In one call and in two; it is announced once."""
    trie = family()
    trie.take_events()
    assert trie.insert([1, 1], [5, 5], tokens_of(15, 15), pending=False) == {}
    assert trie.insert([1], [5], tokens_of(15), pending=False) == {}
    trie.check()
    assert len(trie.take_events()) == 1
    assert sorted(trie.subtree(1)) == [1, 4, 5]


def test_a_block_whose_content_another_one_has_is_its_twin():
    """Ready or pending; what lies below the twin is not entered, and the rest of the call is."""
    trie = family()
    assert trie.insert([0, 5], [5, 4], tokens_of(12, 1), pending=True) == {0: 2}
    assert trie.insert([0, 2], [5, 5], tokens_of(13, 1), pending=False) == {0: 3}
    trie.check()
    assert trie.ancestors(5) == [2, 0]


def test_a_block_is_entered_at_one_place_only():
    with pytest.raises(AssertionError):
        family().insert([2], [4], tokens_of(14), pending=False)


def test_a_ready_block_below_a_pending_one_is_refused():
    with pytest.raises(AssertionError):
        family().insert([3], [5], tokens_of(15), pending=False)


def link_to_itself(trie: PrefixCache) -> None:
    trie._next_sibling[1] = trie._previous_sibling[1] = 1


def link_in_a_ring(trie: PrefixCache) -> None:
    """A child of its own child."""
    trie._first_child[4] = 0
    trie._parent[0] = 4


def link_one_way(trie: PrefixCache) -> None:
    trie._previous_sibling[1] = NO_BLOCK


def link_twice(trie: PrefixCache) -> None:
    trie._first_child[2] = 4


def lose(trie: PrefixCache) -> None:
    trie._first_child[1] = NO_BLOCK


def name_another_parent(trie: PrefixCache) -> None:
    trie._parent[4] = 2


def change_content(trie: PrefixCache) -> None:
    trie._content[4] = 0


def forget_the_key(trie: PrefixCache) -> None:
    trie._block_by_key.popitem()


def keep_a_key(trie: PrefixCache) -> None:
    trie._block_by_key[b"gone"] = 5


def have_no_node(trie: PrefixCache) -> None:
    trie._node[4] = trie._node[5]


def have_one_node_for_two(trie: PrefixCache) -> None:
    trie._node[4] = trie._node[2]


def flag_a_node(trie: PrefixCache) -> None:
    trie.is_node[5] = True


def have_a_ready_child(trie: PrefixCache) -> None:
    trie._pending[1] = True


def be_pending_without_a_node(trie: PrefixCache) -> None:
    trie._pending[5] = True


@pytest.mark.parametrize(
    "break_it",
    [
        link_to_itself,
        link_in_a_ring,
        link_one_way,
        link_twice,
        lose,
        name_another_parent,
        change_content,
        forget_the_key,
        keep_a_key,
        have_no_node,
        have_one_node_for_two,
        flag_a_node,
        have_a_ready_child,
        be_pending_without_a_node,
    ],
)
def test_the_check_finds_what_is_broken(break_it: Callable[[PrefixCache], None]):
    """And comes to an end."""
    trie = family()
    break_it(trie)
    with pytest.raises(AssertionError):
        trie.check()
