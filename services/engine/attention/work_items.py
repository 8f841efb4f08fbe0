"""Cuts a step's attention into work items for `kernels.gpu.attention`: numpy alone, once per step for all layers.

    decode    rows with one query token    splits of the row's keys, so that few rows keep a whole device busy
    prefill   rows with more               tiles of query tokens, each over all keys that one of them sees
    shared    prefixes of decode rows      tiles of the rows' tokens over the keys that these rows have in common

A token whose keys are in several items has one partial output for each, next to each other, the shared prefix first.
"""

from dataclasses import dataclass

import numpy as np

from services.config.engine import SPLIT_KEYS_MULTIPLE
from services.engine.attention.base import PagedQueries
from services.engine.attention.shared_prefix import SharedPrefix, shared_prefixes, tokens_of

_ITEM_COST = 64  # cost of beginning an item and writing its partial output, in keys; an estimate
_GROWTH = np.array([1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128])  # tried sizes of splits, in smallest ones
_MAX_FIXED_SPLITS = 16


@dataclass(frozen=True, slots=True)
class Tiling:
    """Limits of the kernels' tiles, and the number of programs that the device runs at once for one KV head."""

    block_size: int
    programs: int  # for decode
    wide_programs: int  # for prefill and for shared prefixes
    prefill_tokens: int  # tokens of a tile
    shared_tokens: int
    slices: int = 1  # entries of a block in the block tables
    key_tile: int = SPLIT_KEYS_MULTIPLE  # splits are multiples of it
    decode_keys: int = 256  # keys of a split, at least
    prefill_keys: int = 2048
    shared_keys: int = 4096  # prefixes are not shared if that saves fewer reads of a key


@dataclass(frozen=True, slots=True, eq=False)
class WorkItems:
    """A step's items; `kernels.gpu.attention` explains the columns. Arrays are int32."""

    tokens: np.ndarray  # [M]
    limits: np.ndarray  # [M]
    partials: np.ndarray  # [M]
    decode: np.ndarray  # [1 + N, 6]
    prefill: np.ndarray  # [1 + N, 6]
    shared: np.ndarray
    merges: np.ndarray  # [J, 3]: a token, its first partial output and the end of them
    num_partials: int


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """N tiles of query tokens, which become items. Arrays are int64[N]."""

    counts: np.ndarray  # entries of each tile; they lie one after the other
    tables: np.ndarray  # rows of the block tables
    begins: np.ndarray  # first keys
    ends: np.ndarray  # end keys
    splits: np.ndarray
    sizes: np.ndarray  # keys of each split except the last


class WorkPlanner:
    """Cuts steps into work items.

    With `split_keys`, a row's items depend on the row alone, and so does its result, to the bit. A split has split_keys
    keys, counted from the first key that is seen, whatever else is in the step; a longer row has splits of twice as
    many, and so on, so that no row has more than 16. Rows then share no prefixes, since sharing depends on a row's
    neighbours. `share_prefixes` set to False prevents sharing, too.
    """

    def __init__(self, tiling: Tiling, split_keys: int | None = None, *, share_prefixes: bool = True) -> None:
        if split_keys is not None and (split_keys < 1 or split_keys % tiling.key_tile):
            raise ValueError(f"split_keys must be a multiple of {tiling.key_tile}, not {split_keys}")
        self._tiling = tiling
        self._split_keys = split_keys
        self.shares = share_prefixes and split_keys is None  # rows may attend to a prefix together

    def max_partials(self, num_singles: int, has_prefill: bool = False) -> int:
        """Returns a number of partial outputs that suffices for a step.

        num_singles: its rows of one token. has_prefill: it has longer rows, too.
        """
        if self._split_keys is not None:
            return _MAX_FIXED_SPLITS * num_singles
        tiling = self._tiling
        return 2 * num_singles + 8 * tiling.programs + has_prefill * tiling.prefill_tokens * tiling.wide_programs

    def plan(self, queries: PagedQueries, window: int | None, max_partials: int, table_starts: np.ndarray) -> WorkItems:
        """Cuts the step into items with at most max_partials partial outputs (`max_partials` of its rows, or more).

        table_starts: int[R], the index in the staged tables at which each row's blocks begin. Block tables have all
        slices' numbers of a block that layers without a window have, next to each other.
        """
        counts = np.diff(queries.query_starts)
        singles = np.flatnonzero(counts == 1)
        several = np.flatnonzero(counts > 1)
        groups, begins = self._groups(queries, singles, window)
        shared_rows = np.concatenate([group.rows for group in groups]) if groups else np.empty(0, np.int64)
        if max_partials < 2 * len(shared_rows):
            raise ValueError(
                f"{max_partials} partial outputs are too few for {len(shared_rows)} rows that share prefixes"
            )

        budget = max_partials - len(shared_rows)  # a row's own keys have at least one
        shared = self._shared_tiles(groups, singles, max(len(shared_rows), budget // 2))
        of_shared = np.zeros(len(singles), np.int64)
        of_shared[shared_rows] = np.repeat(shared.splits, shared.counts)
        budget = max_partials - int(of_shared.sum())
        decode = self._decode_tiles(queries, singles, begins, of_shared > 0, budget)
        of_single = of_shared + decode.splits
        of_single[of_single == 1] = 0
        prefill, prefill_tokens, prefill_limits = self._prefill_tiles(
            queries, several, window, max_partials - int(of_single.sum())
        )
        of_prefill = np.repeat(np.where(prefill.splits > 1, prefill.splits, 0), prefill.counts)

        single_tokens = queries.query_starts[singles]
        firsts, merges = _merges(np.append(single_tokens, prefill_tokens), np.append(of_single, of_prefill))
        own = np.where(of_single > 0, firsts[: len(singles)] + of_shared, -1)
        lengths = [group.num_blocks * self._tiling.block_size for group in groups]
        tokens = (single_tokens, single_tokens[shared_rows], prefill_tokens)
        limits = (queries.seq_lens[singles], np.repeat(lengths, [len(g.rows) for g in groups]), prefill_limits)
        partials = (own, firsts[shared_rows], np.where(of_prefill > 0, firsts[len(singles) :], -1))
        return WorkItems(
            tokens=np.concatenate(tokens, dtype=np.int32, casting="unsafe"),
            limits=np.concatenate(limits, dtype=np.int32, casting="unsafe"),
            partials=np.concatenate(partials, dtype=np.int32, casting="unsafe"),
            decode=_items(decode, 0, table_starts),
            shared=_items(shared, len(singles), table_starts),
            prefill=_items(prefill, len(singles) + len(shared_rows), table_starts),
            merges=merges,
            num_partials=int(merges[-1, 2]) if len(merges) else 0,
        )

    def _groups(
        self, queries: PagedQueries, singles: np.ndarray, window: int | None
    ) -> tuple[list[SharedPrefix], np.ndarray]:
        """Returns groups of indices into `singles`, and the first key that each of these rows sees on its own."""
        seq_lens = queries.seq_lens[singles].astype(np.int64)
        if window is not None:
            return [], np.maximum(seq_lens - window, 0)
        begins = np.zeros_like(seq_lens)
        if not self.shares or len(singles) < 2:
            return [], begins
        size, slices = self._tiling.block_size, self._tiling.slices
        tables = queries.block_tables if len(singles) == len(queries.seq_lens) else queries.block_tables[singles]
        min_saved = -(-self._tiling.shared_keys // size)
        groups = shared_prefixes(tables, (seq_lens - 1) // size * slices, min_saved * slices)
        if slices > 1:  # rows may have in common some slices of a block
            groups = [SharedPrefix(group.rows, group.num_blocks // slices) for group in groups]
            groups = [group for group in groups if group.num_blocks]
        for group in groups:
            begins[group.rows] = group.num_blocks * size
        return groups, begins

    def _decode_tiles(
        self, queries: PagedQueries, rows: np.ndarray, begins: np.ndarray, is_shared: np.ndarray, max_partials: int
    ) -> _Tiles:
        ends = queries.seq_lens[rows].astype(np.int64)
        if self._split_keys is not None:
            splits, sizes = _fixed(ends - begins, self._split_keys)
        else:
            ones = np.ones(len(rows), np.int64)
            splits, sizes = self._balanced(
                ends - begins, ones, is_shared, self._tiling.decode_keys, self._tiling.programs, max_partials
            )
        return _Tiles(np.ones(len(rows), np.int64), rows, begins, ends, splits, sizes)

    def _shared_tiles(self, groups: list[SharedPrefix], singles: np.ndarray, max_partials: int) -> _Tiles:
        if not groups:
            return _nothing()
        counts = np.array([len(group.rows) for group in groups], np.int64)
        of, _, counts = _cut(counts, self._tiling.shared_tokens)
        ends = np.array([group.num_blocks * self._tiling.block_size for group in groups], np.int64)[of]
        tables = np.array([singles[group.rows[0]] for group in groups], np.int64)[of]
        partial = np.ones(len(of), bool)
        splits, sizes = self._balanced(
            ends, counts, partial, self._tiling.decode_keys, self._tiling.wide_programs, max_partials
        )
        return _Tiles(counts, tables, np.zeros_like(ends), ends, splits, sizes)

    def _prefill_tiles(
        self, queries: PagedQueries, rows: np.ndarray, window: int | None, max_partials: int
    ) -> tuple[_Tiles, np.ndarray, np.ndarray]:
        """Returns tiles, and the token and the limit of each of their entries."""
        if not len(rows):
            return _nothing(), np.empty(0, np.int64), np.empty(0, np.int64)
        lengths = np.diff(queries.query_starts)[rows].astype(np.int64)
        tokens = tokens_of(queries, rows)
        limits = tokens + np.repeat(queries.seq_lens[rows] - queries.query_starts[rows + 1], lengths) + 1
        of, starts, counts = _cut(lengths, self._tiling.prefill_tokens)
        ends = limits[starts + counts - 1]
        begins = np.zeros_like(ends) if window is None else np.maximum(limits[starts] - window, 0)
        splits, sizes = np.ones_like(ends), ends - begins
        if self._split_keys is None:
            apart = np.zeros(len(of), bool)
            splits, sizes = self._balanced(
                ends - begins, counts, apart, self._tiling.prefill_keys, self._tiling.wide_programs, max_partials
            )
        return _Tiles(counts, rows[of], begins, ends, splits, sizes), tokens, limits

    def _balanced(
        self, keys: np.ndarray, counts: np.ndarray, is_partial: np.ndarray, least: int, programs: int, max_partials: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns each tile's number of splits and their size with which all programs end soonest, in at most
        max_partials.

        is_partial: tiles whose entries have partial outputs even with one split.
        """
        longest = int(keys.max(initial=0))
        if longest <= least:
            return np.ones_like(keys), keys
        tile = self._tiling.key_tile
        tried = np.append(least * _GROWTH[least * _GROWTH < longest], longest)[:, None]
        splits = np.ceil(keys / tried)  # exact, and much faster than with integers
        sizes = np.ceil(keys / (splits * tile)) * tile
        splits = np.ceil(keys / sizes)
        items = splits.sum(1)
        partials = np.where(is_partial | (splits > 1), splits * counts, 0).sum(1)
        rounds = np.ceil(items / programs) * (keys.sum() / items + _ITEM_COST)
        cost = np.maximum(rounds, sizes.max(1) + _ITEM_COST)
        cost[partials > max_partials] = np.inf
        best = int(cost.argmin())
        return splits[best].astype(np.int64), sizes[best].astype(np.int64)


def _nothing() -> _Tiles:
    return _Tiles(*([np.empty(0, np.int64)] * 6))


def _fixed(keys: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.full_like(keys, size)
    while (large := keys > sizes * _MAX_FIXED_SPLITS).any():
        sizes[large] *= 2
    return -(-keys // sizes), sizes


def _cut(lengths: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts stretches of entries into tiles of at most `most`. Returns each tile's stretch, first entry and size."""
    pieces = -(-lengths // most)
    of = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    counts = np.minimum(lengths[of] - number * most, most)
    return of, np.cumsum(counts) - counts, counts


def _merges(tokens: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each token's first partial output, and the merges, int32[J, 3]. counts: partial outputs of each token."""
    ends = np.cumsum(counts)
    firsts = ends - counts
    chosen = np.flatnonzero(counts)
    return firsts, np.stack((tokens[chosen], firsts[chosen], ends[chosen]), axis=1).astype(np.int32)


def _items(tiles: _Tiles, first_entry: int, table_starts: np.ndarray) -> np.ndarray:
    """Makes items of the tiles' splits, longest first: the last item to begin should be the shortest."""
    if not len(tiles.counts):
        return np.zeros((1, 6), np.int32)
    order = np.argsort(-tiles.sizes, kind="stable")
    splits = tiles.splits[order]
    of = np.repeat(order, splits)
    split = np.arange(len(of)) - np.repeat(np.cumsum(splits) - splits, splits)
    begins = tiles.begins[of] + split * tiles.sizes[of]
    items = np.empty((1 + len(of), 6), np.int32)
    items[0] = len(of)
    items[1:, 0] = first_entry + (np.cumsum(tiles.counts) - tiles.counts)[of]
    items[1:, 1] = tiles.counts[of]
    items[1:, 2] = table_starts[tiles.tables[of]]
    items[1:, 3] = begins
    items[1:, 4] = np.minimum(begins + tiles.sizes[of], tiles.ends[of])
    items[1:, 5] = split
    return items
