"""Vectors of 16 float32 as values in kernels, for code that LLVM does not vectorize by itself.

LLVM keeps each vector in two registers on a processor without AVX-512. A function asks for the class of processors if
some class has special instructions for its work.

Addresses are int64. Loads and stores need no alignment.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import boolean, float32, int64, types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from services.engine.kernels.cpu.intrinsics import ISA, call_intrinsic

LANES = 16

_WORD, _HALF, _BYTE = ir.IntType(32), ir.IntType(16), ir.IntType(8)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS, _HALVES = ir.VectorType(_WORD, LANES), ir.VectorType(_HALF, LANES)
_CURRENT_ROUNDING = _WORD(4)


class BFloat16s(ir.Type):
    """LLVM's vector of bfloat16, a type that llvmlite lacks."""

    def __init__(self, count: int) -> None:
        self._count = count

    def _to_string(self) -> str:
        return f"<{self._count} x bfloat>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16s) and other._count == self._count

    def __hash__(self) -> int:
        return hash((BFloat16s, self._count))


class _Floats(types.Type):
    """numba's type of a vector."""


floats = _Floats("floats")


@register_model(_Floats)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _FLOATS)


def builtin(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function for kernels from one that builds it of LLVM values, with the latter's parameters except the
    first.
    """

    def decorate(build: Callable[..., Any]) -> Any:
        class Template(ConcreteTemplate):
            key = build
            cases = (signature(result, *parameters),)

        def lower(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            value = build(builder, *arguments)
            return context.get_dummy_value() if value is None else value

        infer(Template)
        infer_global(build, types.Function(Template))
        lower_builtin(build, *parameters)(lower)
        return build

    return decorate


def _operator(function: Any, instruction: str) -> None:
    class Template(ConcreteTemplate):
        key = function
        cases = (signature(floats, floats, floats),)

    def lower(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return getattr(builder, instruction)(*arguments)

    infer_global(function)(Template)
    lower_builtin(function, floats, floats)(lower)


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")


def _load(builder: Any, address: Any, type_: Any) -> Any:
    return builder.load(builder.inttoptr(address, type_.as_pointer()), align=2)


def _store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=2)


def _words(*values: int) -> Any:
    return ir.Constant(_WORDS, values * (LANES // len(values)))


def _shuffle(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    """Returns a vector of chosen lanes of two; the second's lanes are numbered after those of the first."""
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_WORD, len(lanes)), lanes))


@builtin(floats, int64)
def load_floats(builder: Any, address: Any) -> Any:
    """Loads 16 float32."""
    return _load(builder, address, _FLOATS)


@builtin(floats, int64)
def load_bfloat16s(builder: Any, address: Any) -> Any:
    """Loads 16 bfloat16 as float32."""
    words = builder.zext(_load(builder, address, _HALVES), _WORDS)
    return builder.bitcast(builder.shl(words, _words(16)), _FLOATS)


@builtin(types.void, int64, floats)
def store_floats(builder: Any, address: Any, value: Any) -> None:
    """Stores 16 float32."""
    _store(builder, address, value)


@builtin(types.void, int64, floats, floats)
def store_twice_floats(builder: Any, address: Any, first: Any, second: Any) -> None:
    """Stores 32 float32."""
    _store(builder, address, first)
    _store(builder, builder.add(address, address.type(4 * LANES)), second)


@builtin(floats, floats)
def as_it_is(_builder: Any, value: Any) -> Any:
    """Returns the value unchanged."""
    return value


@builtin(floats, floats)
def round_bfloat16s(builder: Any, value: Any) -> Any:
    """Rounds to values that bfloat16 can hold, ties to even. Does not handle NaN."""
    if not ISA.has_bfloat16:
        return builder.bitcast(builder.and_(_half_even(builder, value), _words(0xFFFF0000)), _FLOATS)
    bits = builder.zext(_rounded(builder, value), _WORDS)
    return builder.bitcast(builder.shl(bits, _words(16)), _FLOATS)


@builtin(types.void, int64, floats)
def store_bfloat16s(builder: Any, address: Any, value: Any) -> None:
    """Stores 16 bfloat16, rounded as by `round_bfloat16s`."""
    rounded = _rounded(builder, value) if ISA.has_bfloat16 else _upper_halves(builder, _half_even(builder, value))
    _store(builder, address, rounded)


@builtin(types.void, int64, floats, floats)
def store_twice_bfloat16s(builder: Any, address: Any, first: Any, second: Any) -> None:
    """Stores 32 bfloat16, rounded as by `round_bfloat16s`."""
    if not ISA.has_bfloat16:
        for at, value in ((address, first), (builder.add(address, address.type(2 * LANES)), second)):
            store_bfloat16s(builder, at, value)
        return
    rounded = call_intrinsic(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", BFloat16s(2 * LANES), second, first)
    _store(builder, address, builder.bitcast(rounded, ir.VectorType(_HALF, 2 * LANES)))


@builtin(floats, float32)
def spread(builder: Any, value: Any) -> Any:
    """Returns a vector with this value in all lanes."""
    single = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, _WORD(0))
    return _shuffle(builder, single, ir.Constant(_FLOATS, ir.Undefined), [0] * LANES)


@builtin(floats, floats, floats, floats)
def multiply_add(builder: Any, first: Any, second: Any, third: Any) -> Any:
    """Returns first * second + third, rounded once."""
    return call_intrinsic(builder, "llvm.fma.v16f32", _FLOATS, first, second, third)


@builtin(floats, floats, floats)
def divide(builder: Any, first: Any, second: Any) -> Any:
    """Divides lane by lane."""
    return builder.fdiv(first, second)


@builtin(floats, floats, floats)
def larger_of(builder: Any, first: Any, second: Any) -> Any:
    """Returns the larger value, lane by lane; if one of the two is NaN, the second."""
    return builder.select(builder.fcmp_ordered(">", first, second), first, second)


@builtin(boolean, floats, floats)
def any_above(builder: Any, first: Any, second: Any) -> Any:
    """Returns True if any lane of the first is larger than that of the second."""
    above = builder.bitcast(builder.fcmp_ordered(">", first, second), ir.IntType(LANES))
    return builder.icmp_unsigned("!=", above, above.type(0))


@builtin(floats, floats, floats, floats, floats)
def where_above(builder: Any, first: Any, second: Any, value: Any, otherwise: Any) -> Any:
    """Returns `value` in lanes in which the first is larger than the second, `otherwise` in others."""
    return builder.select(builder.fcmp_ordered(">", first, second), value, otherwise)


@builtin(floats, floats)
def above_whole(builder: Any, value: Any) -> Any:
    """Returns value - floor(value)."""
    if not ISA.has_avx512:
        return builder.fsub(value, call_intrinsic(builder, "llvm.floor.v16f32", _FLOATS, value))
    name, every = "llvm.x86.avx512.mask.reduce.ps.512", ir.IntType(LANES)(-1)
    return call_intrinsic(builder, name, _FLOATS, value, _WORD(1), value, every, _CURRENT_ROUNDING)


@builtin(floats, floats, floats)
def times_power(builder: Any, value: Any, exponent: Any) -> Any:
    """Returns value * 2**floor(exponent), for values about 1; NaN for NaN.

    Results that are too small become 0 or a number close to 0; results that are too large become infinity, or without
    AVX-512 a number above 1e37.
    """
    if not ISA.has_avx512:
        low, high = (ir.Constant(_FLOATS, [float(most)] * LANES) for most in (-125, 126))  # no result is subnormal
        exponent = builder.select(builder.fcmp_ordered(">", exponent, low), exponent, low)
        exponent = builder.select(builder.fcmp_ordered("<", exponent, high), exponent, high)
        whole = builder.fptosi(call_intrinsic(builder, "llvm.floor.v16f32", _FLOATS, exponent), _WORDS)
        power = builder.shl(builder.add(whole, _words(127)), _words(23))
        return builder.fmul(value, builder.bitcast(power, _FLOATS))  # unlike an addition of bits, keeps NaN
    name, every = "llvm.x86.avx512.mask.scalef.ps.512", ir.IntType(LANES)(-1)
    return call_intrinsic(builder, name, _FLOATS, value, exponent, value, every, _CURRENT_ROUNDING)


@builtin(types.void, int64, floats, floats)
def store_pairs(builder: Any, address: Any, first: Any, second: Any) -> None:
    """Stores 16 pairs of bfloat16, a lane of the first before that of the second. Cuts off lower bits."""
    low = builder.lshr(builder.bitcast(first, _WORDS), _words(16))
    high = builder.and_(builder.bitcast(second, _WORDS), _words(0xFFFF0000))
    _store(builder, address, builder.or_(low, high))


@builtin(floats, floats)
def round_half_up(builder: Any, value: Any) -> Any:
    """Prepares a value for `store_pairs`, which cuts off lower bits: rounds to nearest, ties away from 0. Does not
    handle NaN.
    """
    return builder.bitcast(builder.add(builder.bitcast(value, _WORDS), _words(0x8000)), _FLOATS)


@builtin(floats, floats)
def round_half_even(builder: Any, value: Any) -> Any:
    """Prepares a value for `store_pairs`, which cuts off lower bits: rounds to nearest, ties to even. Does not handle
    NaN.
    """
    return builder.bitcast(_half_even(builder, value), _FLOATS)


@builtin(types.void, int64, int64, int64, int64)
def transpose(builder: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> None:
    """Transposes 16 rows of 16 words. Strides: bytes from row to row."""
    rows = [_load(builder, _row(builder, source, source_stride, i), _WORDS) for i in range(LANES)]
    for i, row in enumerate(_transposed(builder, rows)):
        _store(builder, _row(builder, target, target_stride, i), row)


@builtin(types.void, int64, int64, int64, int64)
def transpose_pairs(builder: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> None:
    """Transposes 32 rows of 16 bfloat16 to 16 rows of 32. Strides: bytes from row to row."""
    halves = [_load(builder, _row(builder, source, source_stride, i), _HALVES) for i in range(2 * LANES)]
    lanes = [lane + half for lane in range(LANES) for half in (0, LANES)]
    pairs = [_shuffle(builder, halves[i], halves[i + 1], lanes) for i in range(0, 2 * LANES, 2)]
    rows = [builder.bitcast(pair, _WORDS) for pair in pairs]
    for i, row in enumerate(_transposed(builder, rows)):
        _store(builder, _row(builder, target, target_stride, i), row)


@builtin(types.void, int64, int64, int64, int64)
def transpose_quads(builder: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> None:
    """Transposes 16 rows of 4 words to 4 rows of 16. Strides: bytes from row to row."""
    quad = ir.VectorType(_WORD, 4)
    quads = [_load(builder, _row(builder, source, source_stride, i), quad) for i in range(LANES)]
    rows = []
    for i in range(4):
        low = _shuffle(builder, quads[i], quads[i + 4], list(range(8)))
        high = _shuffle(builder, quads[i + 8], quads[i + 12], list(range(8)))
        rows.append(_shuffle(builder, low, high, list(range(LANES))))
    for i, row in enumerate(_transposed(builder, rows)):
        _store(builder, _row(builder, target, target_stride, i), row)


def sums_of_rows(builder: Any, rows: Callable[[int], list[Any]]) -> list[Any]:
    """Builds, for each of some matrices of 16 rows of 16 float32, a vector of the sums of its rows.

    rows: builds the rows with a number, one of each matrix. It is called as late as it can be, so that few rows exist
    at a time.
    """

    def sums_from(first: int, size: int) -> list[Any]:
        """Builds partial sums of every size-th row from `first` on, alternating every `size` lanes."""
        if size == LANES:
            return rows(first)
        both = zip(sums_from(first, 2 * size), sums_from(first + size, 2 * size), strict=True)
        lanes = [(lane, LANES * bool(lane & size)) for lane in range(LANES)]
        own = [lane + of_row for lane, of_row in lanes]
        other = [(lane ^ size) + of_row for lane, of_row in lanes]
        return [builder.fadd(_shuffle(builder, *pair, own), _shuffle(builder, *pair, other)) for pair in both]

    return sums_from(0, 1)


@builtin(floats, floats, floats, floats)
def add_products_of_pairs(builder: Any, sums: Any, first: Any, second: Any) -> Any:
    """Returns sums + first * second, whose lanes are two bfloat16 each. Needs a processor with such an instruction."""
    assert ISA.has_bfloat16
    pairs = [builder.bitcast(value, BFloat16s(2 * LANES)) for value in (first, second)]
    return call_intrinsic(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, sums, *pairs)


@builtin(types.void, int64, int64, int64)
def interleave_pairs(builder: Any, first: Any, second: Any, target: Any) -> None:
    """Interleaves two rows of 32 bfloat16 in pairs."""
    upper, lower = (_load(builder, address, ir.VectorType(_HALF, 32)) for address in (first, second))
    for start in (0, LANES):
        lanes = [lane + row for lane in range(start, start + LANES) for row in (0, 32)]
        _store(builder, builder.add(target, target.type(4 * start)), _shuffle(builder, upper, lower, lanes))


@builtin(types.void, int64, floats)
def store_cut(builder: Any, address: Any, value: Any) -> None:
    """Stores 16 values as bfloat16 and cuts off their lower bits."""
    _store(builder, address, _upper_halves(builder, builder.bitcast(value, _WORDS)))


@builtin(floats)
def lane_numbers(builder: Any) -> Any:
    """Returns the vector of 0 to 15."""
    return ir.Constant(_FLOATS, list(range(LANES)))


@builtin(float32, floats)
def highest_lane(builder: Any, value: Any) -> Any:
    """Returns the highest of the lanes, none of which is NaN."""
    return builder.call(_function(builder, "llvm.vector.reduce.fmax.v16f32", value), [value], fastmath=("nnan",))


@builtin(float32, floats)
def sum_of_lanes(builder: Any, value: Any) -> Any:
    """Adds up the lanes, in any order."""
    zero = ir.FloatType()(0.0)
    return builder.call(
        _function(builder, "llvm.vector.reduce.fadd.v16f32", zero, value), [zero, value], fastmath=("reassoc",)
    )


def _function(builder: Any, name: str, *arguments: Any) -> Any:
    """Declares an LLVM intrinsic that returns a float32."""
    function_type = ir.FunctionType(ir.FloatType(), [argument.type for argument in arguments])
    return cgutils.get_or_insert_function(builder.module, function_type, name)


def _upper_halves(builder: Any, words: Any) -> Any:
    return builder.trunc(builder.lshr(words, _words(16)), _HALVES)


def _rounded(builder: Any, value: Any) -> Any:
    """Rounds to 16 bfloat16, by an instruction that treats subnormal float32 as 0."""
    rounded = call_intrinsic(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", BFloat16s(LANES), value)
    return builder.bitcast(rounded, _HALVES)


def _half_even(builder: Any, value: Any) -> Any:
    """Returns words whose upper halves are the value in bfloat16."""
    bits = builder.bitcast(value, _WORDS)
    odd = builder.and_(builder.lshr(bits, _words(16)), _words(1))
    return builder.add(builder.add(bits, _words(0x7FFF)), odd)


def _row(builder: Any, address: Any, stride: Any, number: int) -> Any:
    return builder.add(address, builder.mul(stride, stride.type(number)))


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Swaps the squares beside the diagonal: first of half as many columns as there are rows, then of half of that,
    down to 1.

    With fewer than 16 rows, each stretch of as many columns is transposed.
    """
    rows, size = list(rows), len(rows)
    while size := size // 2:
        upper, lower = _halves_of_squares(size)
        for i in range(len(rows)):
            if not i & size:
                pair = rows[i], rows[i + size]
                rows[i], rows[i + size] = _shuffle(builder, *pair, upper), _shuffle(builder, *pair, lower)
    return rows


def _halves_of_squares(size: int) -> tuple[list[int], list[int]]:
    """Returns, for two rows in squares of `size` columns, the lanes of the upper two squares side by side, and of the
    lower two.
    """
    upper = [lane if not lane & size else LANES + lane - size for lane in range(LANES)]
    lower = [lane + size if not lane & size else LANES + lane for lane in range(LANES)]
    return upper, lower
