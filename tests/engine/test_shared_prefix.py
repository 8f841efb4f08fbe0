"""Groups of rows that begin with the same blocks."""

import numpy as np

from services.engine.attention.shared_prefix import shared_prefixes


def groups(tables: list[list[int]], limits: list[int] | None = None, min_saved: int = 1) -> list[tuple[list[int], int]]:
    width = max(map(len, tables))
    padded = np.array([row + [0] * (width - len(row)) for row in tables], dtype=np.int32)
    found = shared_prefixes(padded, np.array(limits or [len(row) for row in tables]), min_saved)
    return sorted((group.rows.tolist(), group.num_blocks) for group in found)


def test_rows_with_nothing_in_common_are_no_group() -> None:
    assert groups([[1, 2], [3, 4], [5]]) == []


def test_a_group_ends_where_its_rows_part() -> None:
    assert groups([[1, 2, 3], [9, 2, 3], [1, 2, 4], [1, 2, 5]]) == [([0, 2, 3], 2)]


def test_a_row_shares_no_more_than_its_limit() -> None:
    assert groups([[1, 2, 3, 4]] * 2, limits=[4, 1]) == [([0, 1], 1)]
    assert groups([[1, 2, 3, 4]] * 2, limits=[4, 0]) == []


def test_a_block_of_another_place_is_not_shared() -> None:
    assert groups([[1, 2], [2, 1]]) == []


def test_what_saves_little_is_no_group() -> None:
    assert groups([[1, 2, 3]] * 3, min_saved=6) == [([0, 1, 2], 3)]
    assert groups([[1, 2, 3]] * 3, min_saved=7) == []


def test_subgroups_that_save_more_are_taken_apart() -> None:
    """A first block that everybody has, and two long prefixes after it."""
    first, second = [1, *range(10, 20)], [1, *range(30, 40)]
    assert groups([first, second, first, second, [1, 99]]) == [([0, 2], 11), ([1, 3], 11)]


def test_a_common_prefix_that_saves_more_is_kept_together() -> None:
    common = list(range(1, 20))
    rows = [[*common, 50, 60 + row // 2] for row in range(6)]
    assert groups(rows) == [([0, 1, 2, 3, 4, 5], 20)]
