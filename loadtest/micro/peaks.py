"""What this machine can do at most: multiply-adds in registers on all cores, by the instructions of the class of its
processor that kernels are made for; and copying memory.
"""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import float32, int64, njit
from numba.extending import intrinsic

from services.engine.kernels.cpu.amx import tiles as amx
from services.engine.kernels.cpu.intrinsics import ISA, float_pointer
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.register_tiles import Arithmetic, arithmetic_of
from services.engine.kernels.cpu.team import the_team
from services.engine.kernels.cpu.vectors import LANES, add_products_of_pairs, floats, multiply_add, spread, sum_of_lanes

_ROUNDS, _ITEMS = 200_000, 8  # of each thread
_RUNS = 12
_COPIED_BYTES = 1 << 29
_SAVED_AT = 64  # bytes, after the sums: the tile configuration that others may have left
_AMX_OPERATIONS = 4 * 2 * 16 * 16 * 32  # of four products of tiles


def peak_flops(dtype: str) -> float:
    """Operations a second, two for a multiply-add."""
    kernel, operations = _amx_loop() if ISA.has_amx and dtype == "bfloat16" else _vector_loop(dtype)
    team, config, sums = the_team(), amx.tile_config(), np.zeros(64, dtype=np.float32)
    items = _ITEMS * team.num_threads
    arguments = _ROUNDS, sums.ctypes.data, config.ctypes.data
    seconds = shortest_s(lambda: team.run(kernel, items, *arguments, at_a_time=1))
    return operations * _ROUNDS * items / seconds


def copy_rate() -> float:
    """Bytes a second that all threads read and write of memory that no cache holds."""
    source, target = torch.ones(_COPIED_BYTES // 4), torch.ones(_COPIED_BYTES // 4)
    return 2 * _COPIED_BYTES / shortest_s(lambda: target.copy_(source))


def shortest_s(run: Callable[[], object]) -> float:
    """Of some runs, since whatever else the machine does only makes them longer."""
    run()
    times = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


_ARG = places("rounds sums config")


@cache
def _vector_loop(dtype: str) -> tuple[Any, int]:
    """A kernel, and the operations of a round: as many independent multiply-adds as a register tile has sums."""
    pairs = arithmetic_of(dtype) is Arithmetic.PAIRS
    chains, arg = ISA.tile_rows * ISA.tile_vectors, _ARG
    loop = _make_loop(chains, pairs=pairs)

    @njit
    def work(a: Any, _item: int, _thread: int) -> None:
        factor = spread(float32(a[arg.rounds]))  # not known when this is compiled
        float_pointer(a[arg.sums])[0] = sum_of_lanes(loop(a[arg.rounds], factor))

    return per_item(work), chains * LANES * (2 if pairs else 1) * 2


def _make_loop(chains: int, *, pairs: bool) -> Any:
    @intrinsic
    def loop(_context: Any, _rounds: Any, _factor: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            rounds, factor = arguments
            entry, body = builder.block, builder.append_basic_block("body")
            end = builder.append_basic_block("end")
            builder.branch(body)
            builder.position_at_end(body)
            left = builder.phi(rounds.type)
            sums = [builder.phi(factor.type) for _ in range(chains)]
            multiply = _multiply_pairs if pairs else _multiply
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


@cache
def _amx_loop() -> tuple[Any, int]:
    """The same of products of tiles, of zeros."""
    arg = _ARG
    products = [amx.add_product(target, 4 + target // 2, 6 + target % 2) for target in range(4)]
    add_0, add_1, add_2, add_3 = products

    @njit
    def work(a: Any, _item: int, _thread: int) -> None:
        saved = a[arg.sums] + _SAVED_AT
        amx.save_config(saved)
        amx.load_config(a[arg.config])
        for _ in range(a[arg.rounds]):
            add_0()
            add_1()
            add_2()
            add_3()
        amx.load_config(saved)

    return per_item(work), _AMX_OPERATIONS
