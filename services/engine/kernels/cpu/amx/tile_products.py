"""The two products of attention over tiles of queries, by AMX; `cpu/tile_attention.py` explains them.

scores [32 keys, 32]     = K [32 keys, 32 columns] x Q^T [32 columns, 32], in pairs of columns
sums   [32 columns, 32] += V^T [32 columns, 32 keys] x weights [32 keys, 32], in pairs of keys
"""

from typing import Any

from services.engine.kernels.cpu.amx import tiles as amx
from services.engine.kernels.cpu.head_rows import clear, padded
from services.engine.kernels.cpu.intrinsics import njit
from services.engine.kernels.cpu.tile_products import TileProducts
from services.engine.kernels.cpu.vectors import transpose_pairs

load_0, load_1, load_2, load_3, _, _, load_6, load_7 = amx.load
stream_4, stream_5 = amx.stream[4:6]  # for keys and values, so that scores and sums stay in the first-level cache
store_0, store_1, store_2, store_3 = amx.store[:4]
zero_0, zero_1, zero_2, zero_3 = amx.zero[:4]
add_4_6_to_0, add_4_7_to_1 = amx.add_product(0, 4, 6), amx.add_product(1, 4, 7)
add_5_6_to_2, add_5_7_to_3 = amx.add_product(2, 5, 6), amx.add_product(3, 5, 7)

_BLOCK = 32  # keys and columns that are multiplied at a time
_LINE, _ROW_BYTES, _TILE_BYTES = 64, 128, 1024


def amx_products(head_dim: int, read_rows: Any) -> TileProducts:
    """Makes the products for bfloat16. read_rows: a function of `make_read_rows`."""
    depth = padded(head_dim)
    return TileProducts(
        key_step=_BLOCK,
        most_rows=max(256, 65536 // depth),  # with a segment of as many keys: half of a large L2 cache
        read_values=_make_read_values(read_rows, depth),
        multiply_keys=_make_multiply_keys(depth),
        multiply_values=_make_multiply_values(depth),
        begin=_begin,
        end=_end,
        config=amx.tile_config(),
    )


@njit
def _begin(saved: int, config: int) -> None:
    amx.save_config(saved)
    amx.load_config(config)


@njit
def _end(saved: int, _config: int) -> None:
    amx.load_config(saved)


@njit
def _clear_sums() -> None:
    zero_0()
    zero_1()
    zero_2()
    zero_3()


@njit
def _load_sums(at: int) -> None:
    load_0(at, _ROW_BYTES)
    load_1(at + _LINE, _ROW_BYTES)
    load_2(at + 16 * _ROW_BYTES, _ROW_BYTES)
    load_3(at + 16 * _ROW_BYTES + _LINE, _ROW_BYTES)


@njit
def _store_sums(at: int) -> None:
    store_0(at, _ROW_BYTES)
    store_1(at + _LINE, _ROW_BYTES)
    store_2(at + 16 * _ROW_BYTES, _ROW_BYTES)
    store_3(at + 16 * _ROW_BYTES + _LINE, _ROW_BYTES)


@njit
def _multiply() -> None:
    add_4_6_to_0()
    add_4_7_to_1()
    add_5_6_to_2()
    add_5_7_to_3()


def _make_multiply_keys(depth: int) -> Any:
    row_bytes = depth * 2

    @njit
    def multiply_keys(keys: int, queries: int, scores: int, count: int) -> None:
        for k in range(0, count, _BLOCK):
            _clear_sums()
            for step in range(depth // _BLOCK):
                stream_4(keys + k * row_bytes + step * _LINE, row_bytes)
                stream_5(keys + (k + 16) * row_bytes + step * _LINE, row_bytes)
                load_6(queries + step * 16 * _ROW_BYTES, _ROW_BYTES)
                load_7(queries + step * 16 * _ROW_BYTES + _LINE, _ROW_BYTES)
                _multiply()
            _store_sums(scores + k * _ROW_BYTES)

    return multiply_keys


def _make_multiply_values(depth: int) -> Any:
    num_columns = depth // 16

    @njit
    def multiply_values(values: int, weights: int, sums: int, count: int) -> None:
        for column in range(0, num_columns, 2):
            at = sums + column * 16 * _ROW_BYTES
            _load_sums(at)
            for k in range(0, count, _BLOCK):
                tile = values + (k // _BLOCK * num_columns + column) * _TILE_BYTES
                stream_4(tile, _LINE)
                stream_5(tile + _TILE_BYTES, _LINE)
                load_6(weights + k // 2 * _ROW_BYTES, _ROW_BYTES)
                load_7(weights + k // 2 * _ROW_BYTES + _LINE, _ROW_BYTES)
                _multiply()
            _store_sums(at)

    return multiply_values


def _make_read_values(read_rows: Any, depth: int) -> Any:
    row_bytes, num_columns = depth * 2, depth // 16

    @njit
    def read_values(pool: int, block_stride: int, table: Any, first: int, count: int, room: int, values: int) -> None:
        """Writes V^T as tiles of [16 columns, 32 keys]."""
        for k in range(0, count, _BLOCK):
            some = min(_BLOCK, count - k)
            read_rows(pool, block_stride, table, first + k, some, room)
            clear(room + some * row_bytes, (_BLOCK - some) * row_bytes)
            for column in range(num_columns):
                transpose_pairs(room + column * 32, row_bytes, values, _LINE)
                values += _TILE_BYTES

    return read_values
