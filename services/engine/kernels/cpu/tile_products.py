"""The two products of attention over tiles of queries, by register tiles; `tile_attention.py` explains them.

scores [keys, 32]      = keys, rows of words        x  queries, [words of a row, 32]
sums   [head_dim, 32] += values, a word of each     x  weights, [keys, 32], or in pairs of keys [keys / 2, 32]
                         column for a step
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.engine.kernels.cpu.head_rows import clear, padded
from services.engine.kernels.cpu.intrinsics import njit
from services.engine.kernels.cpu.register_tiles import Arithmetic, multiply_rows
from services.engine.kernels.cpu.vectors import LANES, interleave_pairs

QUERIES = 2 * LANES  # that are multiplied at a time
_KEY_STEP = 4
_LINE = 64  # bytes
_MOST_ROWS = 512
_LATENT_ROWS, _LATENT_KEYS = 128, 128  # rows of 576 numbers: 128 float32 keys take 288 KiB


@dataclass(frozen=True, slots=True)
class TileProducts:
    """Functions that kernels call, for one head_dim, and their limits. Counts of keys are multiples of key_step."""

    key_step: int
    most_rows: int  # for which the caches have room
    # Arguments of a `make_read_rows` function, with room for 32 rows before the target. Zeros fill up to key_step keys.
    read_values: Any
    multiply_keys: Any  # keys, queries, scores, count
    multiply_values: Any  # values, weights, sums, count
    begin: Any  # address of 64 bytes that it fills for `end`, address of `config`
    end: Any  # the arguments of `begin`
    config: np.ndarray
    most_keys: int = 0  # of a segment, for which the caches have room; 0: as many as there are rows
    # Both products for 16 queries of 32, which few heads of a single token are; None: there are none.
    multiply_keys_narrow: Any = None
    multiply_values_narrow: Any = None

    @property
    def max_rows(self) -> int:
        """Returns the query tokens of a tile times their heads.

        Products take QUERIES rows and key_step keys at a time. So this is a multiple of both: no product then reads or
        writes beyond a tile's memory, or takes keys behind a segment for its own.
        """
        return self._whole(self.most_rows)

    @property
    def segment(self) -> int:
        """Returns the keys of a segment."""
        return self._whole(self.most_keys or self.most_rows)

    def _whole(self, most: int) -> int:
        whole = math.lcm(QUERIES, self.key_step)
        return most // whole * whole


def latent_products(latent_dim: int, rope_dim: int, group: int, *, as_pairs: bool) -> TileProducts:
    """Makes the products over latents, whose keys have latent_dim + rope_dim numbers and whose values are the first
    latent_dim of these.

    `read_values` of the result takes the address of a segment's keys as they were copied, their number, and the address
    of the values. group: query heads; a tile has room for one token's, and for more tokens if these are few.
    """
    row_bytes = padded(latent_dim + rope_dim) * (2 if as_pairs else 4)
    multiply_keys, multiply_values = _latent_functions(latent_dim, rope_dim, QUERIES, as_pairs=as_pairs)
    narrow_keys, narrow_values = _latent_functions(latent_dim, rope_dim, LANES, as_pairs=as_pairs)
    return TileProducts(
        key_step=_KEY_STEP,
        most_rows=max(_LATENT_ROWS, -(-group // QUERIES) * QUERIES),
        read_values=(_make_pair_keys if as_pairs else _make_end_keys)(row_bytes),
        multiply_keys=multiply_keys,
        multiply_values=multiply_values,
        begin=_nothing,
        end=_nothing,
        config=np.zeros(1, dtype=np.uint8),
        most_keys=_LATENT_KEYS,
        multiply_keys_narrow=narrow_keys,
        multiply_values_narrow=narrow_values,
    )


def _latent_functions(latent_dim: int, rope_dim: int, queries: int, *, as_pairs: bool) -> tuple[Any, Any]:
    """Makes both products for so many of 32 queries."""
    of_word = 2 if as_pairs else 1
    multiply = multiply_rows(Arithmetic.PAIRS if as_pairs else Arithmetic.SINGLES, queries)
    row_bytes = padded(latent_dim + rope_dim) * 4 // of_word
    num_steps, value_step = -(-(latent_dim + rope_dim) // of_word), row_bytes * of_word

    @njit
    def multiply_keys(keys: int, queries: int, scores: int, count: int) -> None:
        multiply(count, keys, row_bytes, 4, queries, num_steps, scores, True, queries, 0)

    @njit
    def multiply_values(values: int, weights: int, sums: int, count: int) -> None:
        multiply(latent_dim, values, 4, value_step, weights, count // of_word, sums, False, weights, 0)

    return multiply_keys, multiply_values


def _make_pair_keys(row_bytes: int) -> Any:
    @njit
    def read_values(keys: int, count: int, values: int) -> None:
        """Writes values as words of two keys each."""
        clear(keys + count * row_bytes, -count % _KEY_STEP * row_bytes)
        for k in range(0, (count + _KEY_STEP - 1) // _KEY_STEP * _KEY_STEP, 2):
            for line in range(0, row_bytes, _LINE):
                at = keys + k * row_bytes + line
                interleave_pairs(at, at + row_bytes, values + k * row_bytes + 2 * line)

    return read_values


def _make_end_keys(row_bytes: int) -> Any:
    @njit
    def read_values(keys: int, count: int, _values: int) -> None:
        """Fills the keys, which are the values, with zeros up to a whole step."""
        clear(keys + count * row_bytes, -count % _KEY_STEP * row_bytes)

    return read_values


def register_products(head_dim: int, read_rows: Any, *, as_pairs: bool) -> TileProducts:
    """Makes the products for processors or dtypes without AMX's. read_rows: a function of `make_read_rows`."""
    of_word = 2 if as_pairs else 1
    multiply = multiply_rows(Arithmetic.PAIRS if as_pairs else Arithmetic.SINGLES)
    row_bytes = padded(head_dim) * 4 // of_word
    num_steps, value_step = -(-head_dim // of_word), row_bytes * of_word

    @njit
    def multiply_keys(keys: int, queries: int, scores: int, count: int) -> None:
        multiply(count, keys, row_bytes, 4, queries, num_steps, scores, True, queries, 0)

    @njit
    def multiply_values(values: int, weights: int, sums: int, count: int) -> None:
        multiply(head_dim, values, 4, value_step, weights, count // of_word, sums, False, weights, 0)

    return TileProducts(
        key_step=_KEY_STEP,
        most_rows=_MOST_ROWS,
        read_values=(_make_read_pairs if as_pairs else _make_read_singles)(read_rows, row_bytes),
        multiply_keys=multiply_keys,
        multiply_values=multiply_values,
        begin=_nothing,
        end=_nothing,
        config=np.zeros(1, dtype=np.uint8),
    )


def _make_read_pairs(read_rows: Any, row_bytes: int) -> Any:
    @njit
    def read_values(pool: int, block_stride: int, table: Any, first: int, count: int, room: int, values: int) -> None:
        """Writes values as words of two keys each."""
        for k in range(0, (count + _KEY_STEP - 1) // _KEY_STEP * _KEY_STEP, 2):
            some = min(2, max(0, count - k))
            read_rows(pool, block_stride, table, first + k, some, room)
            clear(room + some * row_bytes, (2 - some) * row_bytes)
            for line in range(0, row_bytes, _LINE):
                interleave_pairs(room + line, room + row_bytes + line, values + k * row_bytes + 2 * line)

    return read_values


def _make_read_singles(read_rows: Any, row_bytes: int) -> Any:
    @njit
    def read_values(pool: int, block_stride: int, table: Any, first: int, count: int, _room: int, values: int) -> None:
        """Writes values as rows of float32."""
        read_rows(pool, block_stride, table, first, count, values)
        clear(values + count * row_bytes, -count % _KEY_STEP * row_bytes)

    return read_values


@njit
def _nothing(_saved: int, _config: int) -> None:
    return
