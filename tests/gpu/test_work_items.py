"""Work items cover each query's keys once, whatever the step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.attention.base import PagedQueries
from services.engine.attention.work_items import Tiling, WorkItems, WorkPlanner

TILING = Tiling(
    block_size=16,
    programs=6,
    wide_programs=6,
    prefill_tokens=8,
    shared_tokens=4,
    key_tile=32,
    decode_keys=64,
    prefill_keys=256,
    shared_keys=64,
)


@st.composite
def steps(draw: st.DrawFn) -> PagedQueries:
    """Rows of one or more query tokens, of which some begin with the same blocks."""
    lengths = draw(st.lists(st.integers(1, 1500), min_size=1, max_size=8))
    counts = [draw(st.one_of(st.just(1), st.integers(1, min(length, 30)))) for length in lengths]
    depth = -(-max(lengths) // 16) + 1
    tables = 1 + np.arange(len(lengths) * depth, dtype=np.int32).reshape(len(lengths), depth)
    for row in range(1, len(lengths)):
        same = draw(st.integers(0, lengths[row] // 16))
        tables[row, :same] = tables[draw(st.integers(0, row - 1)), :same]
    return PagedQueries(np.cumsum([0, *counts], dtype=np.int32), np.array(lengths, np.int32), tables)


def plan(queries: PagedQueries, window: int | None = None, split_keys: int | None = None) -> WorkItems:
    planner = WorkPlanner(TILING, split_keys)
    return planner.plan(queries, window, partials_for(planner, queries), table_starts(queries))


def table_starts(queries: PagedQueries) -> np.ndarray:
    """As if the tables were staged whole."""
    starts: np.ndarray = np.arange(len(queries.seq_lens)) * queries.block_tables.shape[1]
    return starts


def partials_for(planner: WorkPlanner, queries: PagedQueries) -> int:
    counts = np.diff(queries.query_starts)
    return planner.max_partials(int((counts == 1).sum()), bool((counts > 1).any()))


def seen_blocks(queries: PagedQueries, window: int | None) -> list[dict[int, int]]:
    """Of each token, the block in which each key that it sees lies."""
    tokens = []
    for row, (length, table) in enumerate(zip(queries.seq_lens, queries.block_tables, strict=True)):
        count = queries.query_starts[row + 1] - queries.query_starts[row]
        for limit in range(length - count + 1, length + 1):
            keys = range(max(limit - window, 0) if window else 0, limit)
            tokens.append({key: int(table[key // 16]) for key in keys})
    return tokens


def covered_blocks(work: WorkItems, queries: PagedQueries, window: int | None) -> list[dict[int, int]]:
    """Likewise, as the items have it. Fails where a key comes twice."""
    tables = queries.block_tables.reshape(-1)
    tokens: list[dict[int, int]] = [{} for _ in range(queries.query_starts[-1])]
    for kind in (work.decode, work.prefill, work.shared):
        assert len(kind) == 1 + kind[0, 0]
        for first, count, at, begin, end, _ in kind[1:].tolist():
            assert begin < end
            for entry in range(first, first + count):
                limit = int(work.limits[entry])
                keys = range(max(begin, limit - window if window else 0), min(end, limit))
                found = {key: int(tables[at + key // 16]) for key in keys}
                seen = tokens[work.tokens[entry]]
                assert not seen.keys() & found.keys()
                seen.update(found)
    return tokens


@settings(max_examples=40, deadline=None)
@given(steps(), st.sampled_from([None, 1, 100, 5000]), st.sampled_from([None, 32, 256]))
def test_every_key_is_seen_once(queries: PagedQueries, window: int | None, split_keys: int | None) -> None:
    """By each query that sees it, and in its own row's block; other keys are not read."""
    work = plan(queries, window, split_keys)
    assert covered_blocks(work, queries, window) == seen_blocks(queries, window)
    if window:
        begins = {token: min(seen) for token, seen in enumerate(seen_blocks(queries, window))}
        for kind in (work.decode, work.prefill):
            for first, count, _, begin, _, _ in kind[1:].tolist():
                assert begin >= min(begins[work.tokens[entry]] for entry in range(first, first + count))


@settings(max_examples=40, deadline=None)
@given(steps(), st.sampled_from([None, 32]))
def test_partial_outputs_are_one_entrys_each(queries: PagedQueries, split_keys: int | None) -> None:
    """Each is written once and merged once, for the same token; a token without any is written directly, once."""
    work = plan(queries, split_keys=split_keys)
    written = {}
    for kind in (work.decode, work.prefill, work.shared):
        for first, count, _, _, _, split in kind[1:].tolist():
            for entry in range(first, first + count):
                partial = int(work.partials[entry])
                target = ("partial", partial + split) if partial >= 0 else ("token", int(work.tokens[entry]))
                assert target not in written
                written[target] = int(work.tokens[entry])
    merged = {("partial", index): token for token, first, end in work.merges.tolist() for index in range(first, end)}
    direct = set(range(queries.query_starts[-1])) - set(merged.values())
    assert written == merged | {("token", token): token for token in direct}
    assert work.num_partials == len(merged) <= partials_for(WorkPlanner(TILING, split_keys), queries)
    assert len(work.tokens) == len(work.limits) == len(work.partials)


def row_items(work: WorkItems, token: int) -> list[tuple[int, int, int]]:
    """Keys and split of each item of one token."""
    return [
        (begin, end, split)
        for kind in (work.decode, work.prefill)
        for first, count, _, begin, end, split in kind[1:].tolist()
        if token in work.tokens[first : first + count]
    ]


@settings(max_examples=40, deadline=None)
@given(steps())
def test_fixed_splits_are_a_matter_of_the_row_alone(queries: PagedQueries) -> None:
    work = plan(queries, split_keys=256)
    for row, length in enumerate(queries.seq_lens):
        start, end = queries.query_starts[row : row + 2]
        alone = PagedQueries(
            np.array([0, end - start], np.int32), np.array([length]), queries.block_tables[row : row + 1]
        )
        for token in range(start, end):
            assert row_items(work, token) == row_items(plan(alone, split_keys=256), token - start)
    assert all(begin % 256 == 0 for _, _, _, begin, _, _ in work.decode[1:].tolist())


def decode_step(lengths: list[int]) -> PagedQueries:
    tables = np.arange(len(lengths) * 600, dtype=np.int32).reshape(len(lengths), 600)
    return PagedQueries(np.arange(len(lengths) + 1, dtype=np.int32), np.array(lengths, np.int32), tables)


def test_one_long_row_keeps_all_programs_busy() -> None:
    work = plan(decode_step([9000]))
    assert work.decode[0, 0] >= TILING.programs
    assert np.ptp(work.decode[1:, 4] - work.decode[1:, 3]) <= TILING.key_tile * work.decode[0, 0]


def test_enough_rows_are_not_split() -> None:
    work = plan(decode_step([200] * 100))
    assert work.decode[0, 0] == 100
    assert work.num_partials == 0


def test_splits_of_a_step_with_little_room_are_larger() -> None:
    queries = decode_step([9000] * 7)
    planner = WorkPlanner(TILING)
    roomy, tight = (planner.plan(queries, None, most, table_starts(queries)) for most in (100, 15))
    assert 7 < tight.num_partials <= 15 < roomy.num_partials


def test_a_prefix_is_read_once_by_each_tile_of_its_rows() -> None:
    queries = decode_step([1000 + row for row in range(6)])
    queries.block_tables[:, :60] = queries.block_tables[0, :60]
    work = plan(queries)
    assert {(first - 6, count) for first, count, *_ in work.shared[1:].tolist()} == {(0, 4), (4, 2)}
    assert work.decode[1:, 3].tolist() == [960] * 6
    assert plan(queries, window=2000).shared[0, 0] == 0
    assert plan(queries, split_keys=256).shared[0, 0] == 0


def test_a_prefix_that_saves_little_is_not_shared() -> None:
    queries = decode_step([1000, 1000])
    queries.block_tables[:, :60] = queries.block_tables[0, :60]
    planner = WorkPlanner(replace(TILING, shared_keys=1024))
    assert planner.plan(queries, None, 100, table_starts(queries)).shared[0, 0] == 0


def test_too_few_partials_for_a_shared_prefix_are_refused() -> None:
    queries = decode_step([1000] * 4)
    queries.block_tables[:, :60] = queries.block_tables[0, :60]
    with pytest.raises(ValueError, match="partial outputs"):
        WorkPlanner(TILING).plan(queries, None, 7, table_starts(queries))


def test_fixed_splits_are_whole_tiles() -> None:
    with pytest.raises(ValueError, match="split_keys"):
        WorkPlanner(TILING, split_keys=200)
