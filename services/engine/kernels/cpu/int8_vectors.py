"""Vectors between float32 and the integers of products in int8, as values in kernels; see `vectors`."""

from typing import Any

from llvmlite import ir
from numba import float32, int64, types, uint32
from numba.core import cgutils

from services.engine.kernels.cpu.vectors import LANES, builtin, floats

_FLOAT, _WORD = ir.FloatType(), ir.IntType(32)
_FLOATS, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_WORD, LANES)
# A float32 of this size has no bits below 1: the sum with it is rounded to whole numbers, ties to even, and its lower
# bits are the number in two's complement. Its lowest byte is 128: the sum is that of an unsigned code.
_WHOLE = float(3 << 22) + 128
_LOW_BYTES = ir.Constant(_WORDS, [0xFF] * LANES)


@builtin(floats, floats, floats)
def larger_magnitude(builder: Any, first: Any, second: Any) -> Any:
    """Returns the larger of a magnitude and of the second's magnitude, lane by lane; NaN is above all numbers."""
    bits = builder.and_(builder.bitcast(second, _WORDS), ir.Constant(_WORDS, [0x7FFFFFFF] * LANES))
    before = builder.bitcast(first, _WORDS)
    return builder.bitcast(builder.select(builder.icmp_unsigned(">", bits, before), bits, before), _FLOATS)


@builtin(uint32, floats)
def bits_of_largest(builder: Any, magnitudes: Any) -> Any:
    """Returns the bits of the largest magnitude; NaN is above all numbers."""
    name, words = f"llvm.vector.reduce.umax.v{LANES}i32", builder.bitcast(magnitudes, _WORDS)
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_WORD, [_WORDS]), name)
    return builder.call(function, [words])


@builtin(types.void, int64, floats)
def store_bytes(builder: Any, address: Any, values: Any) -> None:
    """Stores 16 codes of -128 to 127 as uint8, 128 added. values: of `whole_codes`."""
    codes = builder.trunc(builder.bitcast(values, _WORDS), ir.VectorType(ir.IntType(8), LANES))
    builder.store(codes, builder.inttoptr(address, codes.type.as_pointer()), align=1)


@builtin(types.void, int64, floats)
def store_split_bytes(builder: Any, address: Any, values: Any) -> None:
    """Stores the same as int16, 128 added, of each four the first and third before the second and fourth."""
    words = builder.and_(builder.bitcast(values, _WORDS), _LOW_BYTES)
    halves = builder.trunc(words, ir.VectorType(ir.IntType(16), LANES))
    lanes = [first + lane for first in range(0, LANES, 4) for lane in (0, 2, 1, 3)]
    ordered = builder.shuffle_vector(halves, halves, ir.Constant(_WORDS, lanes))
    builder.store(ordered, builder.inttoptr(address, ordered.type.as_pointer()), align=1)


@builtin(floats, floats, float32)
def whole_codes(builder: Any, values: Any, factor: Any) -> Any:
    """Rounds values * factor to whole numbers of -128 to 127, ties to even. The lowest byte of a lane is the code, 128
    added; of NaN it is any.
    """
    single = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), factor, _WORD(0))
    spread = builder.shuffle_vector(single, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))
    scaled = builder.fmul(values, spread)
    for comparison, bound in ((">", -128.0), ("<", 127.0)):
        limit = ir.Constant(_FLOATS, [bound] * LANES)
        scaled = builder.select(builder.fcmp_ordered(comparison, scaled, limit), scaled, limit)
    return builder.fadd(scaled, ir.Constant(_FLOATS, [_WHOLE] * LANES))


@builtin(floats, int64, int64)
def load_difference(builder: Any, first: Any, second: Any) -> Any:
    """Loads 16 int32 from each of two addresses; returns their differences, which wrap around, as float32."""
    values = [builder.load(builder.inttoptr(address, _WORDS.as_pointer()), align=4) for address in (first, second)]
    return builder.sitofp(builder.sub(*values), _FLOATS)
