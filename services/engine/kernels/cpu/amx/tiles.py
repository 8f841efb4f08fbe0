"""Intel's AMX, for kernels: tiles of 16 rows of 64 bytes, and their products (Intel's manual, volume 1, 18).

A product multiplies a bfloat16 tile [16, 32] by one [32, 16], and adds the result to a float32 tile [16, 16]. The
second factor has its rows in pairs: each of its 32-bit words holds one column of two rows. Or it multiplies a tile of
uint8 [16, 64] by one of int8 [64, 16], and adds the result to a tile of int32, which wraps around; a word of the second
factor holds one column of four rows.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, types
from numba.extending import intrinsic

from services.engine.kernels.cpu.intrinsics import call_intrinsic

_BYTE, _LONG = ir.IntType(8), ir.IntType(64)
_ADDRESS = ir.PointerType(_BYTE)


def tile_config() -> np.ndarray:
    """Returns the configuration of eight tiles of 16 rows of 64 bytes, uint8[64]."""
    config = np.zeros(64, dtype=np.uint8)
    config[0] = 1  # palette
    config[16:32].view(np.uint16)[:] = 64  # bytes of a row
    config[48:56] = 16  # rows
    return config


def _call(context: Any, builder: Any, name: str, values: list[Any]) -> Any:
    """Builds the call of an LLVM intrinsic that returns nothing."""
    call_intrinsic(builder, name, ir.VoidType(), *values)
    return context.get_dummy_value()


def _of_address(name: str) -> Any:
    @intrinsic
    def instruction(_context: Any, _address: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return _call(context, builder, name, [builder.inttoptr(arguments[0], _ADDRESS)])

        return types.void(int64), generate

    return instruction


def _of_rows(name: str, tile: int) -> Any:
    @intrinsic
    def instruction(_context: Any, _address: Any, _stride: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            values = [_BYTE(tile), builder.inttoptr(arguments[0], _ADDRESS), arguments[1]]
            return _call(context, builder, name, values)

        return types.void(int64, int64), generate

    return instruction


def _of_tiles(name: str, *tiles: int) -> Any:
    @intrinsic
    def instruction(_context: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
            return _call(context, builder, name, [_BYTE(tile) for tile in tiles])

        return types.void(), generate

    return instruction


load_config = _of_address("llvm.x86.ldtilecfg")  # address of 64 bytes
save_config = _of_address("llvm.x86.sttilecfg")
load = tuple(_of_rows("llvm.x86.tileloadd64", tile) for tile in range(8))  # arguments: address, bytes to the next row
stream = tuple(_of_rows("llvm.x86.tileloaddt164", tile) for tile in range(8))  # like `load`, past the first-level cache
store = tuple(_of_rows("llvm.x86.tilestored64", tile) for tile in range(8))
zero = tuple(_of_tiles("llvm.x86.tilezero", tile) for tile in range(8))


def add_product(target: int, left: int, right: int) -> Any:
    """Returns a function without arguments: adds to tile `target` the product of tile `left`, [16, 32], and tile
    `right`, [32, 16] in pairs of rows.
    """
    return _of_tiles("llvm.x86.tdpbf16ps", target, left, right)


def add_product_of_bytes(target: int, left: int, right: int) -> Any:
    """Returns the same for tile `left`, uint8 [16, 64], and tile `right`, int8 [64, 16] in fours of rows."""
    return _of_tiles("llvm.x86.tdpbusd", target, left, right)
