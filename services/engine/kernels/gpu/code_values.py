# mypy: disable-error-code="no-untyped-def"
# A kernel has no Python types.
"""Codes of few bits to the numbers that `tl.dot` takes, in registers.

A code becomes the exponent and mantissa of a 16-bit number by shifts and masks, two codes with each instruction; one
more brings the exponent, or the zero, to its place. Every code's number is exact in bfloat16 and in float16.

A byte has two codes of 4 bits, the first of them in its lower half.
"""

import triton
import triton.language as tl

UINT4 = tl.constexpr("uint4")  # these four are the values of `Code`
INT8 = tl.constexpr("int8")
E4M3 = tl.constexpr("e4m3")
E2M1 = tl.constexpr("e2m1")
CENTRE = tl.constexpr(8)  # what is subtracted from centred codes of UINT4

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_ABOVE_ZEROS = "0x1404", "0x3424"  # prmt's: a register's first two bytes, then its others, each above a byte of zeros
_BELOW_OTHERS = "0x4140", "0x4342"  # each below a byte of the other register
_APART = """
    and.b32 low, $4, 0x0f0f0f0f;
    shr.b32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;"""


def _ptx(*lines: str) -> str:
    return "\n".join(("{ .reg .b32 low, high, upper, pair, sign, factor, addend;", *lines, "}"))


def _uint4(kind: str, one: str, upper: str, addend: str) -> str:
    """Returns PTX for codes 0 to 15, which become the last bits of mantissas. one and addend: pairs of numbers."""
    orders = [(half, order) for half in ("low", "high") for order in _BELOW_OTHERS]
    return _ptx(
        f"mov.b32 upper, {upper}; mov.b32 factor, {one}; mov.b32 addend, {addend};",
        _APART,
        *(
            f"prmt.b32 pair, {half}, upper, {order}; fma.rn.{kind} ${out}, pair, factor, addend;"
            for out, (half, order) in enumerate(orders)
        ),
    )


def _e2m1(kind: str, shift: str, mask: str, factor: str) -> str:
    """Returns PTX for codes of sign, exponent (2 bits) and mantissa (1 bit). shift: from an upper byte to the mask."""
    orders = [(half, order) for half in ("low", "high") for order in _ABOVE_ZEROS]
    return _ptx(
        f"mov.b32 upper, 0; mov.b32 factor, {factor}; mov.b32 addend, 0;",
        _APART,
        *(
            f"prmt.b32 pair, {half}, upper, {order}; shl.b32 sign, pair, 4; and.b32 sign, sign, 0x80008000; "
            f"{shift}; lop3.b32 pair, pair, {mask}, sign, 0xea; fma.rn.{kind} ${out}, pair, factor, addend;"
            for out, (half, order) in enumerate(orders)
        ),
    )


def _e4m3(kind: str, shift: str, mask: str, factor: str) -> str:
    """Returns PTX for codes of sign, exponent (4 bits) and mantissa (3 bits). shift: see `_e2m1`."""
    return _ptx(
        f"mov.b32 upper, 0; mov.b32 factor, {factor}; mov.b32 addend, 0;",
        *(
            f"prmt.b32 pair, $2, upper, {order}; and.b32 sign, pair, 0x80008000; "
            f"{shift}; lop3.b32 pair, pair, {mask}, sign, 0xea; fma.rn.{kind} ${out}, pair, factor, addend;"
            for out, order in enumerate(_ABOVE_ZEROS)
        ),
    )


_UINT4_BF16 = tl.constexpr(_uint4("bf16x2", "0x3f803f80", "0x43434343", "0xc300c300"))  # 128 + code, less 128
_CENTRED_BF16 = tl.constexpr(_uint4("bf16x2", "0x3f803f80", "0x43434343", "0xc308c308"))
_UINT4_F16 = tl.constexpr(_uint4("f16x2", "0x3c003c00", "0x64646464", "0xe400e400"))  # 1024 + code, less 1024
_CENTRED_F16 = tl.constexpr(_uint4("f16x2", "0x3c003c00", "0x64646464", "0xe408e408"))
_E2M1_BF16 = tl.constexpr(_e2m1("bf16x2", "shr.b32 pair, pair, 2", "0x01c001c0", "0x7e807e80"))  # times 2 ** 126
_E2M1_F16 = tl.constexpr(_e2m1("f16x2", "shl.b32 pair, pair, 1", "0x0e000e00", "0x74007400"))  # times 2 ** 14
_E4M3_BF16 = tl.constexpr(_e4m3("bf16x2", "shr.b32 pair, pair, 4", "0x07f007f0", "0x7b807b80"))  # times 2 ** 120
_E4M3_F16 = tl.constexpr(_e4m3("f16x2", "shr.b32 pair, pair, 1", "0x3f803f80", "0x5c005c00"))  # times 2 ** 8


@triton.jit
def two_values(codes, CODE: tl.constexpr, CENTRED: tl.constexpr, DOT: tl.constexpr):
    """Returns the numbers of the first and of the second code of each byte, in DOT.

    CENTRED: less CENTRE, for UINT4. DOT: int8 for UINT4, or a floating-point dtype.
    """
    if tl.int8 == DOT:
        less: tl.constexpr = CENTRE if CENTRED else 0
        return (codes & 15).to(tl.int8) - less, (codes >> 4).to(tl.int8) - less
    if _INTERPRETED:
        return _of_code(codes & 15, CODE, CENTRED).to(DOT), _of_code(codes >> 4, CODE, CENTRED).to(DOT)
    if tl.bfloat16 == DOT:
        if CODE == E2M1:
            return _to_bfloat16(codes, _E2M1_BF16)
        if CENTRED:
            return _to_bfloat16(codes, _CENTRED_BF16)
        return _to_bfloat16(codes, _UINT4_BF16)
    if CODE == E2M1:
        first, second = _to_float16(codes, _E2M1_F16)
    elif CENTRED:
        first, second = _to_float16(codes, _CENTRED_F16)
    else:
        first, second = _to_float16(codes, _UINT4_F16)
    return first.to(DOT), second.to(DOT)


@triton.jit
def one_value(codes, CODE: tl.constexpr, DOT: tl.constexpr):
    """Returns the number of each code of 8 bits, in DOT: the code's own type, or a floating-point one.

    e4m3's NaN becomes 480, in other types than its own.
    """
    if CODE == INT8:
        return codes.to(tl.int8, bitcast=True).to(DOT)
    if tl.float8e4nv == DOT:
        return codes.to(tl.float8e4nv, bitcast=True)
    if _INTERPRETED:
        bits = codes.to(tl.int32)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256).to(DOT)
    if tl.bfloat16 == DOT:
        return tl.inline_asm_elementwise(_E4M3_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    return tl.inline_asm_elementwise(_E4M3_F16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4).to(DOT)


@triton.jit
def _to_bfloat16(codes, PTX: tl.constexpr):
    """Returns the numbers of both halves of each byte."""
    return tl.inline_asm_elementwise(
        PTX, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@triton.jit
def _to_float16(codes, PTX: tl.constexpr):
    """Returns the numbers of both halves of each byte."""
    return tl.inline_asm_elementwise(
        PTX, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
    )


@triton.jit
def _of_code(code, CODE: tl.constexpr, CENTRED: tl.constexpr):
    """Returns the number of a code below 16, in float32."""
    if CODE == E2M1:
        twice = code & 7  # 0, 1, 2, 3, then 4 with steps of 2, then 8 with one of 4
        twice = tl.where(twice < 4, twice, tl.where(twice < 6, 2 * twice - 4, 4 * twice - 16))
        return tl.where(code < 8, 0.5, -0.5) * twice.to(tl.float32)
    less: tl.constexpr = CENTRE if CENTRED else 0
    return code.to(tl.float32) - less
