"""Finds sequences that begin with the same blocks, from their block tables alone."""

from dataclasses import dataclass

import numpy as np

from services.engine.attention.base import PagedQueries


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """Rows whose first num_blocks blocks are the same."""

    rows: np.ndarray  # int64[n], n at least 2
    num_blocks: int


def tokens_of(queries: PagedQueries, rows: np.ndarray) -> np.ndarray:
    """Returns the query tokens of some rows, one row after the other, int64[N]."""
    counts = np.diff(queries.query_starts)[rows]
    ends = np.cumsum(counts)
    tokens: np.ndarray = np.arange(ends[-1]) + np.repeat(queries.query_starts[rows] - (ends - counts), counts)
    return tokens


def shared_prefixes(tables: np.ndarray, limits: np.ndarray, min_saved: int) -> list[SharedPrefix]:
    """Groups rows with a shared prefix; a row is in at most one group.

    tables: int32[R, B]. limits: int[R], blocks of each row that may be shared. A group saves (rows - 1) * num_blocks
    reads of a block; rows that would save less than min_saved are not grouped.
    """
    return _split(tables, limits, np.flatnonzero(limits > 0), 0, min_saved)


def _split(tables: np.ndarray, limits: np.ndarray, rows: np.ndarray, depth: int, min_saved: int) -> list[SharedPrefix]:
    """Groups rows that agree in their first `depth` blocks and have more: all together or in parts, whichever saves
    more.
    """
    found: list[SharedPrefix] = []
    blocks = tables[rows, depth]
    order = np.argsort(blocks, kind="stable")
    borders = np.flatnonzero(np.diff(blocks[order])) + 1
    if len(borders) + 1 == len(rows):
        return found
    for alike in np.split(rows[order], borders):
        if len(alike) < 2:
            continue
        width = int(limits[alike].min())
        same = (tables[alike, :width] == tables[alike[0], :width]).all(axis=0)
        shared = width if same.all() else int(same.argmin())
        together = (len(alike) - 1) * shared
        deeper = alike[limits[alike] > shared]
        apart = _split(tables, limits, deeper, shared, min_saved) if len(deeper) > 1 else []
        if sum((len(group.rows) - 1) * group.num_blocks for group in apart) > together:
            found += apart
        elif together >= min_saved:
            found.append(SharedPrefix(alike, shared))
    return found
