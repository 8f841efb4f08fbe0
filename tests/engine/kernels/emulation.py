"""Classes of processors that this one is not, for tests: the instructions that it lacks are emulated.

Kernels keep the class's sizes, layouts and loops. AMX's instructions become calls of amx_emulator.c, those of AVX-512
become instructions of LLVM that every processor has. Kernels are slower so, and the last bits of what AVX-512 rounds or
treats as 0 may differ.
"""

import ctypes
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from tests import machine

_SOURCE = Path(__file__).with_name("amx_emulator.c")
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
_INTRINSICS = "services.engine.kernels.cpu.intrinsics"
_LANES = 16
_FLOATS, _WORDS = (ir.VectorType(element, _LANES) for element in (ir.FloatType(), ir.IntType(32)))
_FOURS = ir.VectorType(ir.IntType(32), 4 * _LANES)
_HALVES = ir.VectorType(ir.IntType(16), _LANES)
Build = Callable[..., Any]  # of a builder, the type of the result, and arguments: builds the result


def build(directory: Path) -> Path:
    """Compiles the emulator of AMX to a shared library. Raises CalledProcessError; the message is on stderr."""
    library = directory / "amx_emulator.so"
    subprocess.run([machine.GCC, *_FLAGS, "-o", library, _SOURCE], check=True)
    return library


def emulate(name: str) -> ctypes.CDLL | None:
    """Makes all kernels of this process those of a class. Returns the emulator of AMX if it is used.

    Raises RuntimeError where kernels' instructions are imported already: they would be those of another class.
    """
    if _INTRINSICS in sys.modules:
        raise RuntimeError(f"{_INTRINSICS} was imported before {name} was emulated")
    from services.engine.kernels.cpu import code_store, isa

    (chosen,) = [one for one in isa.ISAS if one.name == name]
    lacks = {feature for feature in chosen.features if not isa.host_features().get(feature)}
    isa.this_isa = lambda: chosen  # type: ignore[assignment]
    code_store.the_code_store = code_store.NoStore  # type: ignore[assignment]  # code for this process alone
    instructions: dict[str, Build] = {}
    if "avx512f" in lacks:
        instructions |= _AVX512
    if "avx512vnni" in lacks:
        instructions |= _VNNI
    if "avx512bf16" in lacks:
        instructions |= _BFLOAT16
    emulator = None
    if "amx-tile" in lacks:
        with tempfile.TemporaryDirectory() as directory:
            emulator = ctypes.CDLL(str(build(Path(directory))))
        instructions |= {f"llvm.x86.{name}": _call_of(getattr(emulator, name)) for name in _OF_TILES}
    _replace(instructions)
    return emulator


def _replace(instructions: dict[str, Build]) -> None:
    """Replaces the functions that build some of LLVM's intrinsics."""
    from services.engine.kernels.cpu import intrinsics

    of_processor = intrinsics.call_intrinsic

    def call_intrinsic(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
        if name in instructions:
            return instructions[name](builder, result, *arguments)
        return of_processor(builder, name, result, *arguments)

    intrinsics.call_intrinsic = call_intrinsic


_OF_TILES = (
    "ldtilecfg",
    "sttilecfg",
    "tileloadd64",
    "tileloaddt164",
    "tilestored64",
    "tilezero",
    "tdpbf16ps",
    "tdpbusd",
)


def _call_of(function: Any) -> Build:
    """Builds calls of a function of the emulator by its address."""

    def call(builder: Any, result: Any, *arguments: Any) -> Any:
        values = [_widened(builder, argument) for argument in arguments]
        function_type = ir.FunctionType(result, [value.type for value in values])
        address = ir.IntType(64)(ctypes.cast(function, ctypes.c_void_p).value)
        return builder.call(builder.inttoptr(address, function_type.as_pointer()), values)

    return call


def _widened(builder: Any, value: Any) -> Any:
    """The number of a tile as int64; addresses and strides as they are."""
    is_tile = isinstance(value.type, ir.IntType) and value.type.width == 8
    return builder.zext(value, ir.IntType(64)) if is_tile else value


def _words(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * _LANES)


def _floats(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * _LANES)


def _call(builder: Any, name: str, *values: Any) -> Any:
    """Of an intrinsic that every processor has."""
    function_type = ir.FunctionType(_FLOATS, [_FLOATS] * len(values))
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), values)


def _add_products_of_bytes(builder: Any, _result: Any, sums: Any, unsigned: Any, signed: Any) -> Any:
    """Of four uint8 and int8 each."""
    products = builder.mul(builder.zext(unsigned, _FOURS), builder.sext(signed, _FOURS))
    return _with_neighbours(builder, sums, products, 4)


def _add_halves(builder: Any, _result: Any, first: Any, second: Any) -> Any:
    """The sums of two products of int16 each."""
    words = ir.VectorType(ir.IntType(32), 2 * _LANES)
    products = builder.mul(builder.sext(first, words), builder.sext(second, words))
    return _with_neighbours(builder, _words(0), products, 2)


def _with_neighbours(builder: Any, sums: Any, products: Any, count: int) -> Any:
    """Sums, and so many neighbours of each."""
    for first in range(count):
        lanes = ir.Constant(_WORDS, list(range(first, count * _LANES, count)))
        sums = builder.add(sums, builder.shuffle_vector(products, products, lanes))
    return sums


def _floor(builder: Any, value: Any) -> Any:
    return _call(builder, "llvm.floor.v16f32", value)


def _add_products(builder: Any, _result: Any, sums: Any, first: Any, second: Any) -> Any:
    """Of pairs of bfloat16: the upper ones' product is added first."""
    for widened in (_upper, _lower):
        sums = _call(builder, "llvm.fma.v16f32", widened(builder, first), widened(builder, second), sums)
    return sums


def _upper(builder: Any, pairs: Any) -> Any:
    return builder.bitcast(builder.and_(builder.bitcast(pairs, _WORDS), _words(0xFFFF0000)), _FLOATS)


def _lower(builder: Any, pairs: Any) -> Any:
    return builder.bitcast(builder.shl(builder.bitcast(pairs, _WORDS), _words(16)), _FLOATS)


def _rounded(builder: Any, value: Any) -> Any:
    """To bfloat16, ties to even, as 16-bit words."""
    bits = builder.bitcast(value, _WORDS)
    odd = builder.and_(builder.lshr(bits, _words(16)), _words(1))
    return builder.trunc(builder.lshr(builder.add(builder.add(bits, _words(0x7FFF)), odd), _words(16)), _HALVES)


def _round(builder: Any, result: Any, value: Any) -> Any:
    return builder.bitcast(_rounded(builder, value), result)


def _round_twice(builder: Any, result: Any, upper: Any, lower: Any) -> Any:
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), 2 * _LANES), list(range(2 * _LANES)))
    both = builder.shuffle_vector(_rounded(builder, lower), _rounded(builder, upper), lanes)
    return builder.bitcast(both, result)


def _above_whole(builder: Any, _result: Any, value: Any, *_immediates: Any) -> Any:
    """0 of an infinity, as the processor has it."""
    above = builder.fsub(value, _floor(builder, value))
    is_infinite = builder.fcmp_ordered("==", _call(builder, "llvm.fabs.v16f32", value), _floats(math.inf))
    return builder.select(is_infinite, _floats(0.0), above)


def _times_power(builder: Any, _result: Any, value: Any, exponent: Any, *_immediates: Any) -> Any:
    """By two powers of half the exponent, so that results may become 0 or infinite."""
    for comparison, bound in ((">", _floats(-252)), ("<", _floats(252))):
        exponent = builder.select(builder.fcmp_ordered(comparison, exponent, bound), exponent, bound)
    whole = builder.fptosi(_floor(builder, exponent), _WORDS)
    half = builder.ashr(whole, _words(1))
    for part in (half, builder.sub(whole, half)):
        power = builder.bitcast(builder.shl(builder.add(part, _words(127)), _words(23)), _FLOATS)
        value = builder.fmul(value, power)
    return value


def _look_up(builder: Any, result: Any, table: Any, indices: Any) -> Any:
    """The table's elements with these indices, of which the lower bits count."""
    found, count = ir.Constant(result, ir.Undefined), result.count
    within = builder.and_(indices, ir.Constant(indices.type, [count - 1] * count))
    within = builder.zext(within, ir.VectorType(ir.IntType(32), count)) if count > _LANES else within
    for lane in map(ir.IntType(32), range(count)):
        one = builder.extract_element(table, builder.extract_element(within, lane))
        found = builder.insert_element(found, one, lane)
    return found


_AVX512: dict[str, Build] = {
    "llvm.x86.avx512.permvar.hi.512": _look_up,
    "llvm.x86.avx512.permvar.sf.512": _look_up,
    "llvm.x86.avx512.mask.reduce.ps.512": _above_whole,
    "llvm.x86.avx512.mask.scalef.ps.512": _times_power,
    "llvm.x86.avx512.pmaddw.d.512": _add_halves,
}
_VNNI: dict[str, Build] = {"llvm.x86.avx512.vpdpbusd.512": _add_products_of_bytes}
_BFLOAT16: dict[str, Build] = {
    "llvm.x86.avx512bf16.dpbf16ps.512": _add_products,
    "llvm.x86.avx512bf16.cvtneps2bf16.512": _round,
    "llvm.x86.avx512bf16.cvtne2ps2bf16.512": _round_twice,
}
