"""Vectors of 16 codes of one byte as float32: whole numbers of int8, and float8 e4m3 (4 bits of exponent, 3 of
mantissa, one NaN, no infinity; Micikevicius et al. 2022, arXiv 2209.05433).

Both are exact in bfloat16 and float32.
"""

import math
from typing import Any

from llvmlite import ir
from numba import int64, types

from services.engine.kernels.cpu.intrinsics import call_intrinsic
from services.engine.kernels.cpu.vectors import LANES, builtin, floats

_WORD, _HALF, _BYTE = ir.IntType(32), ir.IntType(16), ir.IntType(8)
_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_WORD, LANES)
_HALVES, _BYTES = ir.VectorType(_HALF, LANES), ir.VectorType(_BYTE, LANES)
_ROUNDING = 1.5 * 2**23  # plus a small number: a float32 whose lowest bits are the number, rounded, ties to even
_FLOAT8_MAX, _FLOAT8_NAN, _LEAST_NORMAL = 448.0, 0x7F, 2.0**-6
_OF_FLOAT16 = 256.0  # e4m3's bits, read as float16's, are smaller by this factor


def _all(element: Any, value: float) -> Any:
    return ir.Constant(ir.VectorType(element, LANES), [value] * LANES)


def _load_bytes(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _BYTES.as_pointer()), align=1)


def _store_bytes(builder: Any, address: Any, words: Any) -> None:
    builder.store(builder.trunc(words, _BYTES), builder.inttoptr(address, _BYTES.as_pointer()), align=1)


@builtin(floats, int64)
def load_int8s(builder: Any, address: Any) -> Any:
    """Loads 16 int8 as float32."""
    return builder.sitofp(builder.sext(_load_bytes(builder, address), _WORDS), _FLOATS)


@builtin(types.void, int64, floats)
def store_int8s(builder: Any, address: Any, value: Any) -> None:
    """Stores 16 numbers between -127 and 127, rounded to int8, ties to even."""
    rounded = builder.fadd(value, _all(ir.FloatType(), _ROUNDING))
    _store_bytes(builder, address, builder.bitcast(rounded, _WORDS))


@builtin(floats, int64)
def load_float8s(builder: Any, address: Any) -> Any:
    """Loads 16 e4m3 as float32."""
    codes = builder.sext(_load_bytes(builder, address), _HALVES)
    bits = builder.and_(builder.shl(codes, _all(_HALF, 7)), _all(_HALF, 0xBF80))
    value = builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), _FLOATS)
    value = builder.fmul(value, _all(ir.FloatType(), _OF_FLOAT16))
    magnitude = builder.and_(codes, _all(_HALF, 0x7F))
    is_nan = builder.icmp_unsigned("==", magnitude, _all(_HALF, _FLOAT8_NAN))
    return builder.select(is_nan, _all(ir.FloatType(), math.nan), value)


@builtin(types.void, int64, floats)
def store_float8s(builder: Any, address: Any, value: Any) -> None:
    """Stores 16 numbers, rounded to e4m3, ties to even; those above 448 become 448, NaN stays NaN."""
    magnitude = call_intrinsic(builder, "llvm.fabs.v16f32", _FLOATS, value)
    largest = _all(ir.FloatType(), _FLOAT8_MAX)
    magnitude = builder.select(builder.fcmp_ordered(">", magnitude, largest), largest, magnitude)
    # Below 2**-6, e4m3 has steps of 2**-9, as float32 has above 2**14: the lowest bits of the sum are the code.
    base = _all(ir.FloatType(), 2.0**14)
    small = builder.sub(builder.bitcast(builder.fadd(magnitude, base), _WORDS), builder.bitcast(base, _WORDS))
    bits = builder.bitcast(magnitude, _WORDS)
    odd = builder.and_(builder.lshr(bits, _all(_WORD, 20)), _all(_WORD, 1))
    rounded = builder.lshr(builder.add(builder.add(bits, _all(_WORD, 0x7FFFF)), odd), _all(_WORD, 20))
    normal = builder.sub(rounded, _all(_WORD, 120 << 3))  # exponents count from -7, not from -127
    is_small = builder.fcmp_ordered("<", magnitude, _all(ir.FloatType(), _LEAST_NORMAL))
    code = builder.select(is_small, small, normal)
    code = builder.select(builder.fcmp_unordered("uno", value, value), _all(_WORD, _FLOAT8_NAN), code)
    sign = builder.and_(builder.lshr(builder.bitcast(value, _WORDS), _all(_WORD, 24)), _all(_WORD, 0x80))
    _store_bytes(builder, address, builder.or_(code, sign))
