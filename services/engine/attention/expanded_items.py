"""Cuts prompts in the expanded form into pieces and work items for `kernels.gpu.expanded`: numpy alone, once per step.

K and V of a piece's keys are made at once, for some heads at a time, in memory that is used again for the next piece.
A piece has the keys of several rows, or a part of one row's, in whole blocks: so a long prefix needs no more memory
than a step's tokens. What a row's last block has behind the row may be anything, and is not seen.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Keys whose K and V are made at once, and the items that attend to them."""

    planes: np.ndarray  # int32[B]: of each block of keys, its plane of layer 0 among all planes of the pool
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
    """Cuts some rows of a step, int64[R], into pieces of at most most_keys keys, those behind a row's last one counted.

    tile: tokens of an item, and keys of a tile. A row's piece ends with a tile and a block, or with the row, so that a
    row's result does not depend on where it is cut; a piece has at least one tile and one block.
    """
    lens = queries.seq_lens[rows].tolist()
    multiple = math.lcm(tile[1], layout.block_size)
    cut = _cut(lens, max(most_keys, multiple), multiple, layout.block_size)
    return [_piece(queries, rows, layout, stretches, tile[0]) for stretches in cut]


def _cut(lens: list[int], most_keys: int, multiple: int, block_size: int) -> Iterator[list[_Stretch]]:
    stretches: list[_Stretch] = []
    used = 0
    for row, length in enumerate(lens):
        begin = 0
        while begin < length:
            room, wanted = most_keys - used, -(-(length - begin) // block_size) * block_size
            taken = wanted if wanted <= room else room // multiple * multiple
            if taken:
                stretches.append(_Stretch(row, begin, min(begin + taken, length), used))
                used += taken
                begin += taken
            if begin < length:
                yield stretches
                stretches, used = [], 0
    yield stretches


def _piece(
    queries: PagedQueries, rows: np.ndarray, layout: KvLayout, stretches: list[_Stretch], tile_tokens: int
) -> Piece:
    planes, items = [], []
    for stretch in stretches:
        row = int(rows[stretch.row])
        blocks = slice(stretch.begin // layout.block_size, -(-stretch.end // layout.block_size))
        planes.append(queries.block_tables[row, blocks] * np.int64(layout.num_layers))
        items.append(_items(queries, row, stretch, tile_tokens))
    ordered = np.concatenate(items)
    longest_first = np.argsort(ordered[:, 4] - ordered[:, 5], kind="stable")
    return Piece(np.concatenate(planes, dtype=np.int32, casting="same_kind"), ordered[longest_first])


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
