"""The peak rate of a core: independent multiply-adds in registers, by the instructions of the class's kernels.

Benchmarks compare kernels with it; no step runs this code.
"""

from typing import Any

from llvmlite import ir
from numba import float32, int64
from numba.extending import intrinsic

from services.engine.kernels.cpu.amx import tiles as amx
from services.engine.kernels.cpu.intrinsics import ISA, call_intrinsic, float_pointer, njit
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.register_tiles import (
    BYTES,
    HALVES,
    WORDS,
    Arithmetic,
    arithmetic_of,
    arithmetic_of_codes,
    multiply_halves,
)
from services.engine.kernels.cpu.vectors import LANES, add_products_of_pairs, floats, multiply_add, spread, sum_of_lanes

_ARG = places("rounds memory config")
_SAVED_AT = 64  # offset in bytes of the saved tile configuration of other code
_CHAINS = ISA.tile_rows * ISA.tile_vectors


def operations_of_round(dtype: str) -> int:
    """Returns the operations of a round; a multiply-add counts as two."""
    if _by_tiles(dtype):
        return 4 * 2 * 16 * 16 * (64 if dtype == "int8" else 32)
    return _CHAINS * LANES * _DEPTHS.get(_arithmetic(dtype), 1) * 2


@per_item
def make_multiply_adds(dtype: str) -> Any:
    """Makes a kernel of multiply-adds. Arguments of the kernel: rounds of an item; 128 bytes of memory; a configuration
    of tiles.

    dtype: bfloat16, float32 or int8.
    """
    return _make_tile_work(dtype) if _by_tiles(dtype) else _make_vector_work(dtype)


def _by_tiles(dtype: str) -> bool:
    return ISA.has_amx and dtype in ("bfloat16", "int8")


def _arithmetic(dtype: str) -> Arithmetic:
    return arithmetic_of_codes() if dtype == "int8" else arithmetic_of(dtype)


def _make_vector_work(dtype: str) -> Any:
    """Makes work by vectors: a round is one independent multiply-add for each vector of sums in a register tile."""
    arg, loop = _ARG, _make_loop(_arithmetic(dtype))

    @njit
    def work(a: Any, _item: int, _thread: int) -> None:
        factor = spread(float32(a[arg.rounds]))  # unknown to the compiler
        float_pointer(a[arg.memory])[0] = sum_of_lanes(loop(a[arg.rounds], factor))

    return work


def _make_loop(arithmetic: Arithmetic) -> Any:
    multiply = _MULTIPLY.get(arithmetic, _multiply)

    @intrinsic
    def loop(_context: Any, _rounds: Any, _factor: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            rounds, factor = arguments
            entry, body = builder.block, builder.append_basic_block("body")
            end = builder.append_basic_block("end")
            builder.branch(body)
            builder.position_at_end(body)
            left = builder.phi(rounds.type)
            sums = [builder.phi(factor.type) for _ in range(_CHAINS)]
            added = [multiply(builder, value, factor) for value in sums]
            after = builder.sub(left, left.type(1))
            left.add_incoming(rounds, entry)
            left.add_incoming(after, body)
            for number, (value, new) in enumerate(zip(sums, added, strict=True)):
                value.add_incoming(ir.Constant(factor.type, [float(number)] * LANES), entry)
                value.add_incoming(new, body)
            builder.cbranch(builder.icmp_signed(">", after, left.type(0)), body, end)
            builder.position_at_end(end)
            total = added[0]
            for value in added[1:]:
                total = builder.fadd(total, value)
            return total

        return floats(int64, floats), generate

    return loop


def _multiply(builder: Any, value: Any, factor: Any) -> Any:
    return multiply_add(builder, factor, factor, value)


def _multiply_pairs(builder: Any, value: Any, factor: Any) -> Any:
    return add_products_of_pairs(builder, value, factor, factor)


def _multiply_bytes(builder: Any, value: Any, factor: Any) -> Any:
    sums, codes = builder.bitcast(value, WORDS), builder.bitcast(factor, BYTES)
    added = call_intrinsic(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, sums, codes, codes)
    return builder.bitcast(added, value.type)


def _multiply_split_bytes(builder: Any, value: Any, factor: Any) -> Any:
    halves = builder.bitcast(factor, HALVES)
    added = builder.add(builder.bitcast(value, WORDS), multiply_halves(builder, halves, halves))
    return builder.bitcast(added, value.type)


# Products that an instruction adds up in each lane, where it is more than one.
_DEPTHS = {Arithmetic.PAIRS: 2, Arithmetic.BYTES: 4, Arithmetic.SPLIT_BYTES: 2}
_MULTIPLY = {
    Arithmetic.PAIRS: _multiply_pairs,
    Arithmetic.BYTES: _multiply_bytes,
    Arithmetic.SPLIT_BYTES: _multiply_split_bytes,
}


def _make_tile_work(dtype: str) -> Any:
    """Makes work by AMX: a round is four products of tiles of zeros."""
    arg, add_product = _ARG, amx.add_product_of_bytes if dtype == "int8" else amx.add_product
    add_0, add_1, add_2, add_3 = (add_product(target, 4 + target // 2, 6 + target % 2) for target in range(4))

    @njit
    def work(a: Any, _item: int, _thread: int) -> None:
        saved = a[arg.memory] + _SAVED_AT
        amx.save_config(saved)
        amx.load_config(a[arg.config])
        for _ in range(a[arg.rounds]):
            add_0()
            add_1()
            add_2()
            add_3()
        amx.load_config(saved)

    return work
