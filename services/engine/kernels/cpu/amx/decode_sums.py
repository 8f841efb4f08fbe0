"""Weighted sums of values for attention of single tokens, by AMX, with the values as they lie in the pool.

A product pairs the rows of its second factor: a word of a row has the same column of two rows. Values would have to be
rearranged for that, and the copies would cost more than the products. So a word of a row of values, two columns of one
key, is taken as it is, and each head has two rows of weights:

    even row   w0 0  w1 0  w2 0 ...     x  values = sums of columns 0, 2, 4, ...
    odd row    0 w0  0 w1  0 w2 ...     x  values = sums of columns 1, 3, 5, ...

Up to 8 heads have their even rows in the upper half of a tile and their odd rows in the lower half. More heads have a
tile for each.
"""

from typing import Any

from services.engine.kernels.cpu.amx import tiles as amx
from services.engine.kernels.cpu.intrinsics import njit

_load_0, _load_1, _load_5, _load_6, _load_7 = *amx.load[:2], *amx.load[5:8]
_store_0, _store_1 = amx.store[:2]
_add_7_5_to_0, _add_7_5_to_1, _add_7_5_to_2, _add_7_5_to_3 = (amx.add_product(to, 7, 5) for to in range(4))
_add_6_5_to_1 = amx.add_product(1, 6, 5)
_MOST_IN_REGISTERS = 4  # tiles. Others are loaded and stored for each 16 keys: heads of 256, and more than 8 heads
_LINE, _TILE_BYTES = 64, 1024


class Sums:
    """The layout of weights and sums in a thread's memory: offsets in bytes.

    Line g of a tile is head g's even row; `odd_weights` and `odd_sums` lead from there to its odd row. Sums have a tile
    for each 32 columns of head_dim.
    """

    def __init__(self, head_dim: int, group: int, start: int) -> None:
        self.columns, self.row_bytes = head_dim // 32, head_dim * 2
        self.parts = 1 if group <= 8 else 2
        self.in_registers = self.parts == 1 and self.columns <= _MOST_IN_REGISTERS
        self.weights = start
        self.sums = self.weights + self.parts * _TILE_BYTES
        self.end = self.sums + self.parts * self.columns * _TILE_BYTES
        self.odd_weights = 8 * _LINE if self.parts == 1 else _TILE_BYTES
        self.odd_sums = 8 * _LINE if self.parts == 1 else self.columns * _TILE_BYTES


def make_get(layout: Sums) -> Any:
    """Makes a function that loads sums into registers 0 to 3, if they have room there. Argument: a thread's memory."""
    return _make_move(layout, amx.load)


def make_put(layout: Sums) -> Any:
    """Makes a function that stores what that of `make_get` loads."""
    return _make_move(layout, amx.store)


def _make_move(layout: Sums, instructions: tuple[Any, ...]) -> Any:
    move_0, move_1, move_2, move_3 = instructions[:_MOST_IN_REGISTERS]
    sums_at, tiles = layout.sums, layout.columns if layout.in_registers else 0

    @njit
    def move(memory: int) -> None:
        at = memory + sums_at
        if tiles > 0:
            move_0(at, _LINE)
        if tiles > 1:
            move_1(at + _TILE_BYTES, _LINE)
        if tiles > 2:
            move_2(at + 2 * _TILE_BYTES, _LINE)
        if tiles > 3:
            move_3(at + 3 * _TILE_BYTES, _LINE)

    return move


def make_add_values(layout: Sums) -> Any:
    """Makes a function that adds weights x values to the sums. Arguments: address of 16 values, a thread's memory."""
    weights_at, sums_at, odd_weights, odd_sums = layout.weights, layout.sums, layout.odd_weights, layout.odd_sums
    columns, parts, row_bytes = layout.columns, layout.parts, layout.row_bytes

    @njit
    def in_registers(values: int, memory: int) -> None:
        _load_7(memory + weights_at, _LINE)
        _load_5(values, row_bytes)
        _add_7_5_to_0()
        if columns > 1:
            _load_5(values + _LINE, row_bytes)
            _add_7_5_to_1()
        if columns > 2:
            _load_5(values + 2 * _LINE, row_bytes)
            _add_7_5_to_2()
        if columns > 3:
            _load_5(values + 3 * _LINE, row_bytes)
            _add_7_5_to_3()

    @njit
    def in_memory(values: int, memory: int) -> None:
        _load_7(memory + weights_at, _LINE)
        if parts == 2:
            _load_6(memory + weights_at + odd_weights, _LINE)
        for column in range(columns):
            at = memory + sums_at + column * _TILE_BYTES
            _load_5(values + column * _LINE, row_bytes)
            _load_0(at, _LINE)
            _add_7_5_to_0()
            _store_0(at, _LINE)
            if parts == 2:
                _load_1(at + odd_sums, _LINE)
                _add_6_5_to_1()
                _store_1(at + odd_sums, _LINE)

    return in_registers if layout.in_registers else in_memory
