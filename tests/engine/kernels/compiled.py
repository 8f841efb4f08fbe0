"""Kernels that are compiled and not run, to be called in a process of `class_process.compile_for`: their assembly."""

from typing import Any

from numba import cfunc, int64, types

from services.engine.kernels.cpu.amx import matmul as amx_matmul
from services.engine.kernels.cpu.amx.decode_attention import AmxDecodeAttention
from services.engine.kernels.cpu.amx.tile_products import amx_products
from services.engine.kernels.cpu.head_rows import make_read_rows
from services.engine.kernels.cpu.register_tiles import Arithmetic, _tile_function, arithmetic_of
from tests.engine.kernels.machine_code import assembly_of

_HEAD_DIM, _BLOCK_SIZE = 64, 16


def register_tiles() -> dict[str, str]:
    """By the value of `Arithmetic`: those that the class uses for bfloat16 and float32."""
    used = {arithmetic_of("bfloat16"), Arithmetic.SINGLES}
    return {each.value: assembly_of(_tile_function(each)) for each in used}


def by_amx() -> dict[str, str]:
    """Products, single tokens' attention, and the two products of prompts' attention."""
    products = amx_products(_HEAD_DIM, make_read_rows("bfloat16", _HEAD_DIM, _BLOCK_SIZE, as_pairs=True))
    kernels = {
        "matmul": amx_matmul.make_matmul("bfloat16", gated=True),
        "decode_attention": AmxDecodeAttention("bfloat16", _HEAD_DIM, 2, _BLOCK_SIZE).kernel,
        "multiply_keys": _as_function(products.multiply_keys),
        "multiply_values": _as_function(products.multiply_values),
    }
    return {name: assembly_of(kernel) for name, kernel in kernels.items()}


def _as_function(product: Any) -> Any:
    @cfunc(types.void(int64, int64, int64, int64))  # type: ignore[untyped-decorator]
    def function(left: int, right: int, sums: int, count: int) -> None:
        product(left, right, sums, count)

    return function
