"""Cuts prompts in the expanded form into pieces and work items for `kernels.gpu.expanded`: numpy alone, once per step.

K and V of a piece's keys are made at once, for some heads at a time, in memory that is used again for the next piece. A
piece has the keys of several rows, or a part of one row's: so a long prefix needs no more memory than a step's tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Keys whose K and V are made at once, and the items that attend to them."""

    rows: np.ndarray  # int64[N], each key's row of the pool in layer 0
    items: np.ndarray  # int32[M, 7], see `kernels.gpu.expanded`


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The keys of one row in a piece, from begin to end; the first one is number `place` of the piece."""

    row: int
    begin: int
    end: int
    place: int


def cut_pieces(
    queries: PagedQueries, rows: np.ndarray, layout: KvLayout, most_keys: int, tile: tuple[int, int]
) -> list[Piece]:
    """Cuts some rows of a step, int64[R], into pieces of at most most_keys keys.

    tile: tokens of an item, and keys of a tile. A row's piece ends with a tile or with the row, so that a row's result
    does not depend on where it is cut; a piece has at least one tile.
    """
    lens = queries.seq_lens[rows].astype(np.int64)
    cut = _cut(lens.tolist(), max(most_keys // tile[1], 1) * tile[1], tile[1])
    return [_piece(queries, rows, layout, stretches, tile[0]) for stretches in cut]


def _cut(lens: list[int], most_keys: int, multiple: int) -> Iterator[list[_Stretch]]:
    stretches: list[_Stretch] = []
    used = 0
    for row, length in enumerate(lens):
        begin = 0
        while begin < length:
            room = most_keys - used
            end = length if length - begin <= room else begin + room // multiple * multiple
            if end > begin:
                stretches.append(_Stretch(row, begin, end, used))
                used += end - begin
                begin = end
            if begin < length:
                yield stretches
                stretches, used = [], 0
    yield stretches


def _piece(
    queries: PagedQueries, rows: np.ndarray, layout: KvLayout, stretches: list[_Stretch], tile_tokens: int
) -> Piece:
    keys, items = [], []
    for stretch in stretches:
        row = int(rows[stretch.row])
        index, positions = np.divmod(np.arange(stretch.begin, stretch.end, dtype=np.int64), layout.block_size)
        blocks = queries.block_tables[row, index].astype(np.int64)
        keys.append(blocks * (layout.num_layers * layout.block_size) + positions)
        items.append(_items(queries, row, stretch, tile_tokens))
    ordered = np.concatenate(items)
    longest_first = np.argsort(ordered[:, 4] - ordered[:, 5], kind="stable")
    return Piece(np.concatenate(keys), ordered[longest_first])


def _items(queries: PagedQueries, row: int, stretch: _Stretch, tile_tokens: int) -> np.ndarray:
    """Returns the items of one row's tiles of tokens that see any key of the stretch, int32[M, 7]."""
    first, end = queries.query_starts[row : row + 2].tolist()
    tokens = np.arange(first, end, tile_tokens)
    counts = np.minimum(end - tokens, tile_tokens)
    limits = tokens + (int(queries.seq_lens[row]) - end) + 1
    last_limits = limits + counts - 1
    places = np.full_like(tokens, stretch.place - stretch.begin)
    begins = np.full_like(tokens, stretch.begin)
    columns = tokens, counts, limits, places, begins, np.minimum(last_limits, stretch.end), last_limits > stretch.end
    items: np.ndarray = np.stack(columns, axis=1)[last_limits > stretch.begin].astype(np.int32)
    return items
