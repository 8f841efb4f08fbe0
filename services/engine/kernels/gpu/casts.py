"""Casts of float32 to the nearest number of a narrower type, ties to even: on a GPU, and in Triton's interpreter.

The GPU's own conversions round so. The interpreter truncates to bfloat16, and loses carries of float8; in it, values
are rounded to numbers of the narrower type before they are converted.
"""

import triton
import triton.language as tl

FLOAT8_MAX = tl.constexpr(448.0)
INT8_MAX = tl.constexpr(127.0)
PAIR_SCALE = tl.constexpr(256.0)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def cast(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Casts float32 to float32, float16 or bfloat16."""
    if _INTERPRETED and dtype == tl.bfloat16:
        x = _keep_bits(x, 7)
    return x.to(dtype)


@triton.jit
def through(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Rounds float32 as a cast to the dtype and back does."""
    return cast(x, dtype).to(tl.float32)


@triton.jit
def to_float8(x: tl.tensor) -> tl.tensor:
    """Casts float32 to float8e4nv, which torch calls float8_e4m3fn; numbers too large become the largest, 448.

    4 bits of exponent, 3 of mantissa, no infinity (Micikevicius et al. 2022, arXiv 2209.05433).
    """
    x = tl.minimum(tl.maximum(x, -FLOAT8_MAX), FLOAT8_MAX)
    if _INTERPRETED:
        # Below 2 ** -6, float8 has steps of 2 ** -9; so has float32 near 1.5 * 2 ** 14.
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, _keep_bits(x, 3))
    return x.to(tl.float8e4nv)


@triton.jit
def to_int8(x: tl.tensor) -> tl.tensor:
    """Rounds float32 to the nearest of -128 to 127, ties to even."""
    x = tl.minimum(tl.maximum(x, -INT8_MAX - 1), INT8_MAX)
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2 ** 23: where float32 has steps of 1


_SPLIT = tl.constexpr("""{
    .reg .b32 sign, rest;
    shl.b32 sign, $2, 8;
    shl.b32 rest, $2, 7;
    and.b32 sign, sign, 0x80008000;
    lop3.b32 $0, rest, 0x3f803f80, sign, 0xea;
    shr.b32 rest, $2, 1;
    and.b32 sign, $2, 0x80008000;
    lop3.b32 $1, rest, 0x3f803f80, sign, 0xea;
}""")


@triton.jit
def split_pairs(pairs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Returns the first and the second float8e4nv of each int16, as float16, exactly, divided by PAIR_SCALE.

    Both formats have a sign, then the exponent, then the mantissa: 3 bits become the upper ones of 10, and an exponent
    less 7 is read as one less 15. float8's one NaN becomes 480 / PAIR_SCALE; `to_float8` makes none.
    """
    if _INTERPRETED:
        bits = pairs.to(tl.int32)
        first = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        second = (bits & 0x8000) | ((bits >> 1) & 0x3F80)
        return first.to(tl.int16).to(tl.float16, bitcast=True), second.to(tl.int16).to(tl.float16, bitcast=True)
    return tl.inline_asm_elementwise(
        _SPLIT, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )  # two pairs in a register


@triton.jit
def _keep_bits(x: tl.tensor, KEPT: tl.constexpr) -> tl.tensor:
    """Rounds to the nearest float32 with at most KEPT bits of mantissa."""
    dropped: tl.constexpr = 23 - KEPT
    bits = x.to(tl.int32, bitcast=True)
    bits += (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
    return tl.where(x == x, (bits & -(1 << dropped)).to(tl.float32, bitcast=True), x)
