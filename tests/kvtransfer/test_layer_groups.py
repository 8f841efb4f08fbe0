"""Layers are divided by their windows into slices of one size, and both sides of a handoff count them alike."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layer_groups import LayerGroups, divide_layers
from kvtransfer.layout import KvLayout, fingerprint

LAYOUT = KvLayout(num_layers=2, num_kv_heads=4, head_dim=8, block_size=4, dtype="bfloat16")


def by_turns(num_layers: int, every: int, window: int = 512) -> tuple[int | None, ...]:
    return tuple(window if (layer + 1) % every else None for layer in range(num_layers))


@pytest.mark.parametrize(
    ("name", "windows", "sizes", "num_layers"),
    [
        ("gemma-2-2b", by_turns(26, 2), (1, 1), 13),
        ("gemma-3-1b", by_turns(26, 6), (1, 6), 4),
        ("gemma-3-4b", by_turns(34, 6), (1, 6), 5),
        ("gemma-3-12b", by_turns(48, 6), (1, 5), 8),
        ("gpt-oss-20b", by_turns(24, 2), (1, 1), 12),
        ("seven layers", by_turns(7, 6), (1, 6), 1),
        ("three windows", (None, 8, 4, None, 8, 4), (1, 1, 1), 2),
        ("no full layer", (8, 4, 8, 4), (1, 1), 2),
    ],
)
def test_published_models_have_few_slices(
    name: str, windows: tuple[int | None, ...], sizes: tuple[int, ...], num_layers: int
) -> None:
    groups = divide_layers(windows)
    assert groups is not None
    assert (groups.sizes, groups.num_layers) == (sizes, num_layers)


@given(st.lists(st.sampled_from([None, 4, 9, 512]), max_size=60).map(tuple))
def test_every_layer_is_in_one_slice_of_its_window(windows: tuple[int | None, ...]) -> None:
    groups = divide_layers(windows)
    if len(set(windows)) < 2:
        assert groups is None
        return
    assert groups is not None
    layers = [layer for group in groups.slices for one in group for layer in one]
    assert sorted(layers) == list(range(len(windows)))
    for window, slices in zip(groups.windows, groups.slices, strict=True):
        assert {windows[layer] for layers in slices for layer in layers} == {window}
    assert groups.windows[0] is None if None in windows else groups.windows[0] == max(w for w in windows if w)
    assert groups.num_slices * groups.num_layers - len(windows) <= 0.1 * len(windows)


@given(st.integers(0, 40), st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_slices_and_the_blocks_that_they_fill(num_blocks: int, unseen: tuple[int, int]) -> None:
    groups = LayerGroups((None, 9, 5), (((0,),), ((1,), (2,)), ((3,),)))
    behind = np.array(unseen)
    counted = sum(1 + 2 * (index >= unseen[0]) + (index >= unseen[1]) for index in range(num_blocks))
    assert groups.num_in(num_blocks, behind) == counted
    assert groups.num_whole(counted, behind) == num_blocks
    of_next = groups.num_in(num_blocks + 1, behind) - counted
    assert all(groups.num_whole(counted + part, behind) == num_blocks for part in range(of_next))


@pytest.mark.parametrize(("position", "unseen"), [(0, 0), (9, 0), (10, 0), (11, 0), (12, 1), (15, 1), (16, 2)])
def test_the_first_block_that_a_position_sees(position: int, unseen: int) -> None:
    """In a window of 9, a token at 12 sees 4 to 12: nothing of the first block of 4."""
    groups = LayerGroups((None, 9), (((0,),), ((1,),)))
    assert groups.unseen(position, 4).tolist() == [unseen]
    assert groups.unseen(np.array([position, 0]), 4).tolist() == [[unseen], [0]]


def test_groups_are_in_the_fingerprint() -> None:
    groups = LayerGroups((None, 9), (((0, 1),), ((2, 3),)))
    others = [None, groups, replace(groups, windows=(None, 8)), replace(groups, slices=(((0, 2),), ((1, 3),)))]
    digests = [fingerprint(replace(LAYOUT, groups=each), "weights", {"theta": 1e4}) for each in others]
    assert len(set(digests)) == len(others)
