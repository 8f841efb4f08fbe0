"""Additions to numba for kernels that run on raw memory: pointers, bit casts, a stack, an atomic counter.

An import of this module makes numba compile for the class of processors that was chosen.
"""

from functools import partial
from typing import Any

import numba
from llvmlite import ir
from numba import float32, float64, int32, int64, types, uint8, uint16, uint32
from numba.core import cgutils
from numba.extending import intrinsic

from services.engine.kernels.cpu.isa import host_features, host_processor, is_amd, known_isa

ISA = known_isa()
HAS_VNNI = ISA.has_vnni(host_features())
numba.config.CPU_NAME = host_processor()
numba.config.CPU_FEATURES = ISA.target_features(host_features())

# Decorates functions that only kernels call; wrappers for Python would take a sixth of the time to compile.
njit = partial(numba.njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def call_intrinsic(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Builds the call of an LLVM intrinsic that stands for instructions of some processors; result: its LLVM type."""
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def _pointer_to(element: Any) -> Any:
    @intrinsic
    def pointer(_context: Any, _address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(int64), generate

    return pointer


float_pointer = _pointer_to(float32)


@intrinsic
def address_of(_context: Any, _pointer: Any) -> Any:
    """Returns the address in a pointer, int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return int64(_pointer), generate


byte_pointer = _pointer_to(uint8)
half_pointer = _pointer_to(uint16)
int_pointer = _pointer_to(int32)
word_pointer = _pointer_to(uint32)
long_pointer = _pointer_to(int64)


@intrinsic
def float_bits(_context: Any, _value: Any) -> Any:
    """Returns the bits of a float32, uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return uint32(float32), generate


@intrinsic
def bits_float(_context: Any, _bits: Any) -> Any:
    """Returns the float32 with these bits (uint32)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return float32(uint32), generate


@intrinsic
def float_of_half(_context: Any, _bits: Any) -> Any:
    """Returns the float32 that is equal to the float16 with these bits (uint16)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return float32(uint16), generate


@intrinsic
def float64_of(_context: Any, _bits: Any) -> Any:
    """Returns the float64 with these bits (int64)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return float64(int64), generate


@intrinsic(prefer_literal=True)
def stack(_context: Any, _count: Any) -> Any:
    """Returns a pointer to so many float32 (a constant), which exist as long as the function runs."""
    count = _count.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = cgutils.alloca_once(builder, ir.ArrayType(ir.FloatType(), count))
        array.align = 64
        return builder.bitcast(array, context.get_value_type(signature.return_type))

    return types.CPointer(float32)(_count), generate


@intrinsic
def fetch_add(_context: Any, _pointer: Any, _value: Any) -> Any:
    """Adds to an int64 that several threads share. Returns its earlier value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", *arguments, "acq_rel")

    return int64(types.CPointer(int64), int64), generate


@intrinsic
def load_acquire(_context: Any, _pointer: Any) -> Any:
    """Returns an int64 that other threads write. Their writes before it are visible afterwards."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(arguments[0], "acquire", 8)

    return int64(types.CPointer(int64)), generate


@intrinsic
def store_release(_context: Any, _pointer: Any, _value: Any) -> Any:
    """Writes an int64 that other threads read. Writes before it are visible to whoever has read it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, value = arguments
        builder.store_atomic(value, pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.CPointer(int64), int64), generate


@intrinsic
def cycles(_context: Any) -> Any:
    """Returns the processor's time stamp, int64: on all its cores the same, and of a constant rate."""

    def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        return call_intrinsic(builder, "llvm.readcyclecounter", ir.IntType(64))

    return int64(), generate


@intrinsic
def pause(_context: Any) -> Any:
    """Leaves the core to its other hardware thread for a moment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function_type = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


# Caches into which a line is prefetched, by LLVM's numbers.
ALL_CACHES, ALL_BUT_THE_FIRST = 3, 2
# The same for memory that is read once and seldom in order. Both cores of an EPYC of Zen 4 read scattered pages of 4 KB
# at 25 to 36 GB/s by ALL_BUT_THE_FIRST, and at 19 to 23 by ALL_CACHES.
FOR_SCATTERED = ALL_BUT_THE_FIRST if is_amd(host_processor()) else ALL_CACHES


def build_prefetch(builder: Any, address: Any, caches: int) -> None:
    """Builds the prefetch, for reading, of the cache line at an address."""
    bytes_pointer, flag = ir.PointerType(ir.IntType(8)), ir.IntType(32)
    function_type = ir.FunctionType(ir.VoidType(), [bytes_pointer, flag, flag, flag])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    line = builder.inttoptr(address, bytes_pointer)
    builder.call(function, [line, flag(0), flag(caches), flag(1)])  # for reading; data, not instructions


def _prefetch(caches: int) -> Any:
    """Makes a function that prefetches the cache line at an address."""

    @intrinsic
    def ask(_context: Any, _address: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            build_prefetch(builder, arguments[0], caches)
            return context.get_dummy_value()

        return types.void(int64), generate

    return ask


prefetch_far = _prefetch(ALL_BUT_THE_FIRST)
prefetch_scattered = _prefetch(FOR_SCATTERED)


@intrinsic
def call_at(_context: Any, _address: Any, _argument: Any) -> Any:
    """Calls the C function at an address, with one address as argument or without arguments."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        bytes_pointer = ir.PointerType(ir.IntType(8))
        function_type = ir.FunctionType(ir.VoidType(), [bytes_pointer])
        function = builder.inttoptr(arguments[0], ir.PointerType(function_type))
        builder.call(function, [builder.inttoptr(arguments[1], bytes_pointer)])
        return context.get_dummy_value()

    return types.void(int64, int64), generate


@njit
def load_bfloat16(pointer: Any, index: int) -> float:
    """Returns an element as float32."""
    return bits_float(uint32(pointer[index]) << uint32(16))


@njit
def store_bfloat16(pointer: Any, index: int, value: float) -> None:
    """Writes a float32 rounded to nearest, ties to even. Does not handle NaN."""
    pointer[index] = uint16(round_bits(value) >> uint32(16))


@njit
def round_bits(value: float) -> int:
    """Returns the bits of a float32 whose upper half is rounded to bfloat16."""
    bits = float_bits(value)
    return bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))


@njit
def round_bfloat16(value: float) -> float:
    """Returns the nearest float32 that bfloat16 can hold."""
    return bits_float(round_bits(value) & uint32(0xFFFF0000))


@njit
def load_float32(pointer: Any, index: int) -> float:
    """Returns an element."""
    return pointer[index]


@njit
def store_float32(pointer: Any, index: int, value: float) -> None:
    """Writes a float32 unchanged."""
    pointer[index] = value


@njit
def round_float32(value: float) -> float:
    """Returns the value unchanged."""
    return value
