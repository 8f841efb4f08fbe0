"""Kernels that are compiled and not run, to be called in a process of `class_process.compile_for`: their assembly."""

from numba import int64

from services.engine.kernels.cpu.amx import int8_matmul as amx_int8_matmul
from services.engine.kernels.cpu.amx import matmul as amx_matmul
from services.engine.kernels.cpu.amx.decode_attention import AmxDecodeAttention
from services.engine.kernels.cpu.amx.tile_products import amx_products
from services.engine.kernels.cpu.decode_products import arithmetic_of_values, make_add_values, make_score_keys
from services.engine.kernels.cpu.head_rows import make_read_rows
from services.engine.kernels.cpu.register_tiles import (
    Arithmetic,
    _tile_function,
    arithmetic_of,
    arithmetic_of_codes,
)
from tests.engine.kernels.machine_code import assembly_of, compile_function

_HEAD_DIM, _BLOCK_SIZE = 64, 16


def register_tiles() -> dict[str, str]:
    """By the value of `Arithmetic`: those that the class uses for bfloat16, float32 and int8."""
    used = {arithmetic_of("bfloat16"), Arithmetic.SINGLES, arithmetic_of_codes()}
    return {each.value: assembly_of(_tile_function(each)) for each in used}


def decode_products(heads: int, head_dim: int) -> dict[str, tuple[str, str]]:
    """By dtype, of single tokens' attention: the scores of 16 keys, and the loop that adds their values."""
    return {dtype: _decode_products(dtype, heads, head_dim) for dtype in ("bfloat16", "float32")}


def _decode_products(dtype: str, heads: int, head_dim: int) -> tuple[str, str]:
    score_keys = make_score_keys(dtype, head_dim, heads, prefetches=True)
    add_values = make_add_values(arithmetic_of_values(dtype), head_dim, heads, prefetches=True)

    def scores(keys: int, queries: int, into: int, ahead: int) -> None:
        score_keys(keys, queries, into, ahead)

    def values(weights: int, rows: int, steps: int, sums: int, ahead: int) -> None:
        add_values(weights, rows, steps, sums, ahead)

    return compile_function(scores, *[int64] * 4), compile_function(values, *[int64] * 5)


def by_amx() -> dict[str, str]:
    """Products, single tokens' attention, and the two products of prompts' attention."""
    products = amx_products(_HEAD_DIM, make_read_rows("bfloat16", _HEAD_DIM, _BLOCK_SIZE, as_pairs=True))
    multiply_keys, multiply_values = products.multiply_keys, products.multiply_values

    def keys(left: int, right: int, sums: int, count: int) -> None:
        multiply_keys(left, right, sums, count)

    def values(left: int, right: int, sums: int, count: int) -> None:
        multiply_values(left, right, sums, count)

    return {
        "matmul": assembly_of(amx_matmul.make_matmul("bfloat16", gated=True)),
        "int8_matmul": assembly_of(amx_int8_matmul.make_int8_matmul("bfloat16", gated=True)),
        "decode_attention": assembly_of(AmxDecodeAttention("bfloat16", _HEAD_DIM, 2, _BLOCK_SIZE).kernel),
        "multiply_keys": compile_function(keys, *[int64] * 4),
        "multiply_values": compile_function(values, *[int64] * 4),
    }


def coded_tiles() -> dict[str, str]:
    """The assembly of tiles of codes with float16 scales and offsets, by code and arithmetic."""
    from services.engine.kernels.cpu import coded_tiles
    from services.engine.kernels.cpu.coded_products import coded_arithmetic
    from services.engine.kernels.cpu.scale_forms import ScaleForm
    from services.engine.quantization.codes import Code

    found = {}
    for code in (Code.UINT4, Code.INT8):
        for arithmetic in {coded_arithmetic(dtype) for dtype in ("bfloat16", "float32")}:
            tile = coded_tiles._tile_function(arithmetic, code, ScaleForm.FLOAT16, has_offsets=True)
            found[f"{code.value} {arithmetic.value}"] = assembly_of(tile)
    return found
