"""Unpacking of panels of codes, for products of so many rows that it takes less time than they do.

b [depth, 32] = scale * code + offset, as `register_tiles` takes it: in words of PAIRS, rounded to bfloat16, or of
SINGLES
"""

from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba import int64, types
from numba.core import cgutils
from numba.extending import intrinsic

from services.engine.kernels.cpu.coded_values import CodeReader
from services.engine.kernels.cpu.compiled import MachineCode, compiled
from services.engine.kernels.cpu.intrinsics import call_intrinsic
from services.engine.kernels.cpu.register_tiles import COLUMNS, STEP_BYTES, Arithmetic
from services.engine.kernels.cpu.scale_forms import ScaleForm
from services.engine.kernels.cpu.vectors import LANES, BFloat16s
from services.engine.quantization.codes import Code

_NUM_ARGUMENTS = 7
_VECTORS = COLUMNS // LANES
_HALF, _WORD, _LONG = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_WORD, LANES)
_PAIRS = ir.VectorType(_HALF, 2 * LANES)


@cache
def unpack_codes(arithmetic: Arithmetic, code: Code, scales: ScaleForm, *, has_offsets: bool) -> Any:
    """Makes a function that kernels call. scales: the form of scales and offsets.

    Its arguments: address of the first group's codes; groups; steps of a group, and of the last; bytes between a
    group's last step and its scales; address of b; address of the codes' table.
    """
    function = _function(arithmetic, code, scales, has_offsets=has_offsets)
    symbol = function.symbol
    binding.add_symbol(symbol, function.address)

    @intrinsic
    def call_unpack(
        _context: Any,
        _codes: Any,
        _groups: Any,
        _steps: Any,
        _last_steps: Any,
        _between: Any,
        _target: Any,
        _table: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            function_type = ir.FunctionType(ir.VoidType(), [_LONG] * _NUM_ARGUMENTS)
            builder.call(cgutils.get_or_insert_function(builder.module, function_type, symbol), arguments)
            return context.get_dummy_value()

        return types.void(*[int64] * _NUM_ARGUMENTS), generate

    return call_unpack


@cache
def _function(arithmetic: Arithmetic, code: Code, scales: ScaleForm, *, has_offsets: bool) -> MachineCode:
    """Makes the C function, compiled once for all kernels that call it."""
    return _make_function(arithmetic, code, scales, has_offsets=has_offsets)


@compiled(*[int64] * _NUM_ARGUMENTS)
def _make_function(arithmetic: Arithmetic, code: Code, scales: ScaleForm, *, has_offsets: bool) -> Any:
    unpack = _unpack(arithmetic, code, scales, has_offsets=has_offsets)

    def function(codes: int, groups: int, steps: int, last_steps: int, between: int, target: int, table: int) -> None:
        unpack(codes, groups, steps, last_steps, between, target, table)

    return function


def _unpack(arithmetic: Arithmetic, code: Code, scales: ScaleForm, *, has_offsets: bool) -> Any:
    @intrinsic
    def unpack(
        _context: Any,
        _codes: Any,
        _groups: Any,
        _steps: Any,
        _last_steps: Any,
        _between: Any,
        _target: Any,
        _table: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            *others, table = arguments
            reader = CodeReader(builder, code, table)
            _Unpacking(builder, arithmetic, reader, scales, has_offsets=has_offsets).build(*others)
            return context.get_dummy_value()

        return types.void(*[int64] * _NUM_ARGUMENTS), generate

    return unpack


class _Unpacking:
    """Builds the loops over groups and their steps."""

    def __init__(
        self, builder: Any, arithmetic: Arithmetic, reader: CodeReader, scales: ScaleForm, *, has_offsets: bool
    ) -> None:
        self._builder = builder
        self._arithmetic = arithmetic
        self._reader = reader
        self._scales = scales
        self._has_offsets = has_offsets

    def build(self, codes: Any, groups: Any, steps: Any, last_steps: Any, between: Any, target: Any) -> None:
        """Builds the loop over groups."""
        builder, reader, form = self._builder, self._reader, self._scales
        of_group = form.tail_bytes(has_offsets=False)
        entry, loop, end = builder.block, builder.append_basic_block("group"), builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        left, now, into = (self._running(value, entry) for value in (groups, codes, target))
        block_before = self._running(codes, entry) if form.has_two_levels else None
        is_last = builder.icmp_unsigned("==", left, _LONG(1))
        own_steps = builder.select(is_last, last_steps, steps)
        block, first = now, now
        if block_before is not None:
            index = builder.sub(groups, left)
            block, first = reader.block(index, now, block_before, form, has_offsets=self._has_offsets)
        at_scales = builder.add(builder.add(first, builder.mul(own_steps, _LONG(reader.step_bytes))), between)
        after = builder.add(at_scales, _LONG(of_group))
        scales = [reader.scale(block, at_scales, form, v) for v in range(_VECTORS)]
        offsets = []
        if self._has_offsets:
            offsets = [reader.offset(block, after, form, v) for v in range(_VECTORS)]
            after = builder.add(after, _LONG(of_group))
        into_next = self._build_steps(first, own_steps, into, scales, offsets)
        for running, value in ((left, builder.sub(left, _LONG(1))), (now, after), (into, into_next)):
            running.add_incoming(value, builder.block)
        if block_before is not None:
            block_before.add_incoming(block, builder.block)
        builder.cbranch(is_last, end, loop)
        builder.position_at_end(end)

    def _build_steps(self, codes: Any, steps: Any, target: Any, scales: list[Any], offsets: list[Any]) -> Any:
        """Builds the loop over a group's steps. Returns the address after what it writes."""
        builder, reader = self._builder, self._reader
        entry, loop, end = builder.block, builder.append_basic_block("steps"), builder.append_basic_block("unpacked")
        builder.branch(loop)
        builder.position_at_end(loop)
        left, now, into = (self._running(value, entry) for value in (steps, codes, target))
        words = reader.depth // self._arithmetic.depth
        for v in range(_VECTORS):
            loaded = reader.load(now, v)
            for word in range(words):
                depths = range(word * self._arithmetic.depth, (word + 1) * self._arithmetic.depth)
                numbers = [self._number(reader.singles(loaded, depth), v, scales, offsets) for depth in depths]
                place = builder.add(into, _LONG(word * STEP_BYTES + v * LANES * 4))
                value = numbers[0] if len(numbers) == 1 else self._rounded_pair(*numbers)
                builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=4)
        into_next = builder.add(into, _LONG(words * STEP_BYTES))
        after = builder.sub(left, _LONG(1)), builder.add(now, _LONG(reader.step_bytes)), into_next
        for running, value in zip((left, now, into), after, strict=True):
            running.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed(">", left, _LONG(1)), loop, end)
        builder.position_at_end(end)
        return into_next

    def _number(self, value: Any, vector: int, scales: list[Any], offsets: list[Any]) -> Any:
        if offsets:
            return call_intrinsic(self._builder, "llvm.fma.v16f32", _FLOATS, value, scales[vector], offsets[vector])
        return self._builder.fmul(value, scales[vector])

    def _rounded_pair(self, first: Any, second: Any) -> Any:
        """Rounds to words of two bfloat16."""
        builder = self._builder
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        halves = builder.bitcast(call_intrinsic(builder, name, BFloat16s(2 * LANES), second, first), _PAIRS)
        lanes = [lane + half for lane in range(LANES) for half in (0, LANES)]
        order = ir.Constant(ir.VectorType(_WORD, 2 * LANES), lanes)
        return builder.shuffle_vector(halves, halves, order)

    def _running(self, value: Any, entry: Any) -> Any:
        """Makes a value of the loop that begins as `value`."""
        running = self._builder.phi(value.type)
        running.add_incoming(value, entry)
        return running
