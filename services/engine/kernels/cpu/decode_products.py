"""The two products of attention of single tokens, over 16 keys and values: rows as they lie in the KV pool."""

from typing import Any

from llvmlite import ir
from numba import int64, types
from numba.extending import intrinsic

from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.intrinsics import FOR_SCATTERED, ISA, build_prefetch
from services.engine.kernels.cpu.register_tiles import Arithmetic, TileBuilder, arithmetic_of
from services.engine.kernels.cpu.vectors import (
    LANES,
    add_products_of_pairs,
    builtin,
    load_floats,
    multiply_add,
    store_floats,
    sums_of_rows,
)

_LONG, _WORD_BYTES, _LINE = ir.IntType(64), 4, 64
_ZEROS = ir.Constant(ir.VectorType(ir.FloatType(), LANES), [0.0] * LANES)


def make_score_keys(dtype: str, depth: int, heads: int, *, prefetches: bool) -> Any:
    """Makes a function that kernels call; it writes the products of 16 keys and some queries.

    Its arguments: address of keys, rows of `depth` elements, a multiple of 32; address of queries, rows of words (see
    `head_rows`), one for each head; address of float32[heads, 16] that it writes; address of 16 keys that it prefetches
    if it `prefetches`.
    """
    as_pairs, size = arithmetic_of(dtype) is Arithmetic.PAIRS, ELEMENTS[dtype].size
    load_keys = load_floats if as_pairs else ELEMENTS[dtype].load_vector
    key_vector, vectors = (_LINE, depth // LANES // 2) if as_pairs else (LANES * size, depth // LANES)
    key_bytes, at_once = depth * size, _heads_at_once(dtype, vectors)
    turns = [range(head, min(head + at_once, heads)) for head in range(0, heads, at_once)]
    ahead_lines, calls = LANES * key_bytes // _LINE if prefetches else 0, len(turns) * LANES

    @builtin(types.void, int64, int64, int64, int64)
    def score_keys(builder: Any, keys: Any, queries: Any, scores: Any, ahead: Any) -> None:
        def at(address: Any, num_bytes: int) -> Any:
            return builder.add(address, _LONG(num_bytes))

        for turn, some in enumerate(turns):
            lines = [
                load_floats(builder, at(queries, i * _LINE)) for i in range(some.start * vectors, some.stop * vectors)
            ]

            def products(key: int, turn: int = turn, lines: list[Any] = lines) -> list[Any]:
                sums = [_ZEROS] * (len(lines) // vectors)
                for v in range(vectors):
                    of_key = load_keys(builder, at(keys, key * key_bytes + v * key_vector))
                    sums = [
                        _add_products(builder, total, of_key, line, as_pairs=as_pairs)
                        for total, line in zip(sums, lines[v::vectors], strict=True)
                    ]
                call = turn * LANES + key
                for line in range(call * ahead_lines // calls, (call + 1) * ahead_lines // calls):
                    build_prefetch(builder, at(ahead, line * _LINE), FOR_SCATTERED)
                return sums

            for head, of_head in zip(some, sums_of_rows(builder, products), strict=True):
                store_floats(builder, at(scores, head * _LINE), of_head)

    return score_keys


def _heads_at_once(dtype: str, vectors: int) -> int:
    """Returns how many heads share the loads of keys, and in bfloat16 their conversion. vectors: of a query.

    The queries of these heads fill at most 12 registers: with more, sums leave theirs. With several heads in float32, a
    key's prefetches follow each other too closely: 64 rows of 600 tokens took 45 ms on an EPYC of Zen 4, and 39 with
    one.
    """
    return max(1, min(3, 12 // vectors)) if dtype == "bfloat16" and ISA.has_avx512 else 1


def _add_products(builder: Any, sums: Any, keys: Any, query: Any, *, as_pairs: bool) -> Any:
    if as_pairs:
        return add_products_of_pairs(builder, sums, keys, query)
    return multiply_add(builder, keys, query, sums)


def arithmetic_of_values(dtype: str) -> Arithmetic:
    """Returns the arithmetic for values in the pool."""
    if dtype == "float32":
        return Arithmetic.SINGLES
    return Arithmetic.ROW_PAIRS if arithmetic_of(dtype) is Arithmetic.PAIRS else Arithmetic.ROWS


def make_add_values(arithmetic: Arithmetic, depth: int, heads: int, *, prefetches: bool) -> Any:
    """Makes a function that kernels call; it adds the products of weights and values to the sums of some heads.

    Its arguments: address of weights, words in rows of 64 bytes, one for each head; address of values, rows of `depth`
    elements; steps; address of sums, float32[heads, depth]; address of values, of which it prefetches as many if it
    `prefetches`.
    """
    size = 2 if arithmetic.takes_rows else 4

    def build_tile(builder: Any, rows: range, columns: range, arguments: Any) -> None:
        """Builds the tile of some heads and some vectors of columns; those of the first heads prefetch."""
        weights, values, steps, sums, ahead = arguments
        ahead_bytes = arithmetic.depth * len(columns) * LANES * size if prefetches and rows.start == 0 else 0
        tile = TileBuilder(
            builder,
            arithmetic,
            len(rows),
            caches=FOR_SCATTERED,
            vectors=len(columns),
            row_bytes=depth * 4,
            ahead_bytes=ahead_bytes,
        )
        tile.build(
            columns.start,
            builder.add(weights, _LONG(rows.start * _LINE)),
            _LONG(_LINE),
            _LONG(_WORD_BYTES),
            values,
            _LONG(arithmetic.depth * depth * size),
            steps,
            builder.add(sums, _LONG(rows.start * depth * 4)),
            _LONG(0),
            builder.add(ahead, _LONG(columns.start * LANES * LANES * size)),
            _LONG(ahead_bytes),
        )

    @intrinsic
    def add_values(_context: Any, _weights: Any, _values: Any, _steps: Any, _sums: Any, _ahead: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            for rows in _shares(heads, ISA.tile_rows):
                for columns in _shares(depth // LANES, _most_columns(len(rows))):
                    build_tile(builder, rows, columns, arguments)
            return context.get_dummy_value()

        return types.void(*[int64] * 5), generate

    return add_values


def _shares(count: int, most: int) -> list[range]:
    """Cuts a range into shares of about the same size, of at most `most`."""
    shares = -(-count // most)
    return [range(share * count // shares, (share + 1) * count // shares) for share in range(shares)]


def _most_columns(rows: int) -> int:
    """Returns how many vectors of columns a tile of so many rows has, if all is to fit into registers."""
    return max(1, (ISA.num_vectors - 2) // (rows + 1))
