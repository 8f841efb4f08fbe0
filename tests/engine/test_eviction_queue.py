"""The eviction queue against a plain list."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.blocks.eviction_queue import EvictionQueue

NUM_BLOCKS = 24


def array(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, dtype=np.int32)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_blocks_come_and_go_as_in_a_list(data: st.DataObject):
    """Few at once and many, in any order."""
    queue = EvictionQueue(NUM_BLOCKS)
    expected: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        outside = sorted(set(range(NUM_BLOCKS)) - set(expected))
        grows: bool = data.draw(st.booleans())
        if outside and grows:
            added: list[int] = data.draw(st.lists(st.sampled_from(outside), unique=True))
            queue.append(array(added))
            expected += added
        elif expected:
            removed = data.draw(st.lists(st.sampled_from(expected), unique=True))
            queue.remove(array(removed))
            expected = [block for block in expected if block not in removed]
        queue.check()
        assert queue.to_list() == expected
        assert len(queue) == len(expected)
        assert np.flatnonzero(queue.which(np.arange(NUM_BLOCKS))).tolist() == sorted(expected)
        assert [block for block in range(NUM_BLOCKS) if queue.has(block)] == sorted(expected)
        assert not expected or queue.oldest == expected[0]


def test_the_check_finds_a_link_that_is_wrong():
    queue = EvictionQueue(6)
    queue.append(array([0, 1, 2, 3, 4]))
    queue.check()
    queue._next[1] = 3
    with pytest.raises(AssertionError):
        queue.check()
    queue._next[1], queue._next[2] = 2, 0
    with pytest.raises(AssertionError, match="cycle"):
        queue.check()
