"""The pieces of expanded prompts, and their items: every token meets each key that it sees, once."""

import numpy as np
import pytest

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries
from services.engine.attention.expanded_items import Piece, cut_pieces

TILE = (32, 16)  # tokens, keys


def cut(lens: list[int], counts: list[int], most_keys: int, block_size: int) -> tuple[PagedQueries, list[Piece]]:
    layout = KvLayout(3, 1, 8, block_size, "float32", num_planes=1)
    starts = np.cumsum([0, *counts], dtype=np.int32)
    width = -(-max(lens) // block_size)
    tables = np.random.default_rng(0).permutation(len(lens) * width).astype(np.int32).reshape(-1, width)
    queries = PagedQueries(starts, np.array(lens, np.int32), tables)
    return queries, cut_pieces(queries, np.arange(len(lens)), layout, most_keys, TILE)


@pytest.mark.parametrize("block_size", [8, 16, 24])
@pytest.mark.parametrize("most_keys", [1, 48, 100, 1000])
@pytest.mark.parametrize("lens", [[1], [48, 48], [47, 50, 1], [200, 7, 96, 33]])
def test_each_token_sees_each_of_its_keys_once(lens: list[int], most_keys: int, block_size: int) -> None:
    counts = [max(1, length * 2 // 3) for length in lens]
    queries, pieces = cut(lens, counts, most_keys, block_size)
    seen = {token: list[tuple[int, int]]() for token in range(sum(counts))}
    for piece in pieces:
        assert len(piece.planes) * block_size <= max(most_keys, 48)
        for first, count, limit, place, begin, end, goes_on in piece.items.tolist():
            row = int(np.searchsorted(queries.query_starts, first, side="right")) - 1
            assert begin % TILE[1] == 0
            for token in range(first, first + count):
                keys = np.arange(begin, min(limit + token - first, end))
                blocks, at = np.divmod(place + keys, block_size)
                assert (piece.planes[blocks] == queries.block_tables[row, keys // block_size] * 3).all()
                assert (at == keys % block_size).all()
                assert len(seen[token]) == min(begin, limit + token - first), "all keys before"
                seen[token] += [(row, int(key)) for key in keys]
            assert bool(goes_on) == (limit + count - 1 > end)
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        for index in range(count):
            token = int(queries.query_starts[row]) + index
            assert seen[token] == [(row, key) for key in range(length - count + 1 + index)]


def test_as_few_pieces_as_fit() -> None:
    assert [len(cut([100, 60], [100, 60], most, 16)[1]) for most in (176, 175, 48, 1)] == [1, 2, 4, 11]
