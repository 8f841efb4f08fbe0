"""Products of a few rows with a panel of codes, in registers, without unpacking.

    totals [rows, 32] = a [rows, depth] x numbers [depth, 32 columns]

A group's codes are multiplied as they are, and their sums stay in registers as in `register_tiles`. Then the group's
scale multiplies the sums, and its offset the sum of the row's a over the group, which is computed beforehand:

    totals += scale * sums + offset * sum of a

So no number is rounded before the product. a has words of PAIRS or SINGLES (see `Arithmetic`).
"""

from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba import int64, types
from numba.core import cgutils
from numba.extending import intrinsic

from services.engine.kernels.cpu.coded_values import CodeReader
from services.engine.kernels.cpu.compiled import MachineCode, compiled
from services.engine.kernels.cpu.intrinsics import (
    ALL_CACHES,
    FOR_SCATTERED,
    ISA,
    build_prefetch,
    call_intrinsic,
)
from services.engine.kernels.cpu.register_tiles import COLUMNS, Arithmetic, TileBuilder
from services.engine.kernels.cpu.scale_forms import ScaleForm
from services.engine.kernels.cpu.vectors import LANES
from services.engine.quantization.codes import Code

# Of a tile. Beside their sums, registers hold a table and the codes.
CODED_ROWS = ISA.tile_rows - 2
_FEW_ROWS = CODED_ROWS // 2 + 1
_NUM_ARGUMENTS, _LINE = 12, 64
_VECTORS = COLUMNS // LANES
_FLOAT, _WORD, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_ZEROS = ir.Constant(_FLOATS, [0.0] * LANES)


@cache
def multiply_codes(arithmetic: Arithmetic, code: Code, scales: ScaleForm, *, has_offsets: bool) -> Any:
    """Makes a function that kernels call. scales: the form of scales and offsets.

    Its arguments: rows, at most CODED_ROWS; address of a, and bytes from row to row; address of the sums of a, float32
    for each group, and bytes from row to row; address of the panel; groups; steps of a group, and of the last;
    address of totals, ROW_BYTES from row to row; address of the codes' table; bytes from what is read to what is
    prefetched.
    """
    return _make_call(_tile_function(arithmetic, code, scales, has_offsets=has_offsets))


@cache
def _tile_function(arithmetic: Arithmetic, code: Code, scales: ScaleForm, *, has_offsets: bool) -> MachineCode:
    """Makes the C function, compiled once for all kernels that call it."""
    return _make_tile_function(arithmetic, code, scales, has_offsets=has_offsets)


@compiled(*[int64] * _NUM_ARGUMENTS)
def _make_tile_function(arithmetic: Arithmetic, code: Code, scales: ScaleForm, *, has_offsets: bool) -> Any:
    tile = _tile(arithmetic, code, scales, has_offsets=has_offsets)

    def function(
        rows: int,
        a: int,
        a_row: int,
        a_sums: int,
        a_sums_row: int,
        b: int,
        groups: int,
        steps: int,
        last_steps: int,
        totals: int,
        table: int,
        ahead: int,
    ) -> None:
        tile(rows, a, a_row, a_sums, a_sums_row, b, groups, steps, last_steps, totals, table, ahead)

    return function


def _make_call(tile_function: MachineCode) -> Any:
    """Makes a function that calls the tile function by its symbol: its address differs from process to process."""
    symbol = tile_function.symbol
    binding.add_symbol(symbol, tile_function.address)

    @intrinsic
    def call_tile(
        _context: Any,
        _rows: Any,
        _a: Any,
        _a_row: Any,
        _a_sums: Any,
        _a_sums_row: Any,
        _b: Any,
        _groups: Any,
        _steps: Any,
        _last_steps: Any,
        _totals: Any,
        _table: Any,
        _ahead: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            function_type = ir.FunctionType(ir.VoidType(), [_LONG] * _NUM_ARGUMENTS)
            builder.call(cgutils.get_or_insert_function(builder.module, function_type, symbol), arguments)
            return context.get_dummy_value()

        return types.void(*[int64] * _NUM_ARGUMENTS), generate

    return call_tile


def _tile(arithmetic: Arithmetic, code: Code, scales: ScaleForm, *, has_offsets: bool) -> Any:
    @intrinsic
    def tile(
        _context: Any,
        _rows: Any,
        _a: Any,
        _a_row: Any,
        _a_sums: Any,
        _a_sums_row: Any,
        _b: Any,
        _groups: Any,
        _steps: Any,
        _last_steps: Any,
        _totals: Any,
        _table: Any,
        _ahead: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            rows, *others, table, ahead = arguments
            done = builder.append_basic_block("done")
            switch = builder.switch(rows, done)
            reader = CodeReader(builder, code, table)
            for count in range(1, CODED_ROWS + 1):
                block = builder.append_basic_block(f"rows_{count}")
                switch.add_case(_LONG(count), block)
                builder.position_at_end(block)
                for vector in range(0, _VECTORS, ISA.tile_vectors):
                    vectors = range(vector, vector + ISA.tile_vectors)
                    own = CodedTileBuilder(builder, arithmetic, count, reader, scales, vectors, has_offsets=has_offsets)
                    own.build_groups(ahead if vector == 0 else None, *others)
                builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*[int64] * _NUM_ARGUMENTS), generate

    return tile


# Sums; the address after the last step of b; those after the last step of a.
_Multiplied = tuple[list[Any], Any, list[Any]]


class CodedTileBuilder(TileBuilder):
    """Builds the loops over groups and their steps for one number of rows and some vectors of columns."""

    def __init__(
        self,
        builder: Any,
        arithmetic: Arithmetic,
        rows: int,
        reader: CodeReader,
        scales: ScaleForm,
        vectors: range,
        *,
        has_offsets: bool,
    ) -> None:
        caches = FOR_SCATTERED if rows <= _FEW_ROWS else ALL_CACHES
        super().__init__(builder, arithmetic, rows, caches=caches, vectors=len(vectors))
        self._reader = reader
        self._scales = scales
        self._own = vectors
        self._has_offsets = has_offsets

    def build_groups(
        self,
        ahead: Any,
        a: Any,
        a_row: Any,
        a_sums: Any,
        a_sums_row: Any,
        b: Any,
        groups: Any,
        steps: Any,
        last_steps: Any,
        totals: Any,
    ) -> None:
        """Builds the loops. ahead: None: nothing is prefetched."""
        builder, reader, form = self._builder, self._reader, self._scales
        of_group = form.tail_bytes(has_offsets=False)
        places = self._places(builder.add(totals, _LONG(self._own.start * 64)))
        for place in places:
            builder.store(_ZEROS, place, align=4)
        pointers = [builder.add(a, builder.mul(a_row, _LONG(row))) for row in range(0, self._rows, 3)]
        entry, loop, end = builder.block, builder.append_basic_block("group"), builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        left, b_now, a_sums_now = (self._running(value, entry) for value in (groups, b, a_sums))
        a_now = [self._running(pointer, entry) for pointer in pointers]
        block_before = self._running(b, entry) if form.has_two_levels else None
        is_last = builder.icmp_unsigned("==", left, _LONG(1))
        own_steps = builder.select(is_last, last_steps, steps)
        block, codes = b_now, b_now
        if block_before is not None:
            index = builder.sub(groups, left)
            block, codes = reader.block(index, b_now, block_before, form, has_offsets=self._has_offsets)
            if ahead is not None:
                self._ask_for_lines(builder.add(block, ahead), form.head_bytes(has_offsets=self._has_offsets))
        sums, b_next, a_next = self._multiply_steps(a_now, a_row, codes, own_steps, ahead)
        scales = [reader.scale(block, b_next, form, v) for v in self._own]
        if ahead is not None:
            self._ask_for_lines(builder.add(b_next, ahead), of_group * (2 if self._has_offsets else 1))
        after = builder.add(b_next, _LONG(of_group))
        offsets = []
        if self._has_offsets:
            offsets = [reader.offset(block, after, form, v) for v in self._own]
            after = builder.add(after, _LONG(of_group))
        for row in range(self._rows):
            if self._has_offsets:
                a_sum = self._spread_float(builder.add(a_sums_now, builder.mul(a_sums_row, _LONG(row))))
            for v in range(self._vectors):
                at = row * self._vectors + v
                total = builder.load(places[at], align=4)
                total = call_intrinsic(builder, "llvm.fma.v16f32", _FLOATS, scales[v], sums[at], total)
                if self._has_offsets:
                    total = call_intrinsic(builder, "llvm.fma.v16f32", _FLOATS, offsets[v], a_sum, total)
                builder.store(total, places[at], align=4)
        self._next(left, builder.sub(left, _LONG(1)))
        self._next(b_now, after)
        self._next(a_sums_now, builder.add(a_sums_now, _LONG(4)))
        if block_before is not None:
            self._next(block_before, block)
        for old, new in zip(a_now, a_next, strict=True):
            self._next(old, new)
        builder.cbranch(is_last, end, loop)
        builder.position_at_end(end)

    def _multiply_steps(self, a: list[Any], a_row: Any, b: Any, steps: Any, ahead: Any) -> _Multiplied:
        """Builds the loop over a group's steps. Returns sums, and the addresses after the last step."""
        builder, reader = self._builder, self._reader
        twice = builder.shl(a_row, _LONG(1))
        entry, loop, end = builder.block, builder.append_basic_block("steps"), builder.append_basic_block("summed")
        builder.branch(loop)
        builder.position_at_end(loop)
        left, b_now = self._running(steps, entry), self._running(b, entry)
        a_now = [self._running(pointer, entry) for pointer in a]
        sums = running = [self._running(_ZEROS, entry) for _ in range(self._rows * self._vectors)]
        if ahead is not None:
            self._ask_for_lines(builder.add(b_now, ahead), reader.step_bytes)
        loaded = [reader.load(b_now, v) for v in self._own]
        for word in range(reader.depth // self._arithmetic.depth):
            if self._arithmetic is Arithmetic.PAIRS:
                numbers = [reader.pairs(codes, word) for codes in loaded]
            else:
                numbers = [reader.singles(codes, word) for codes in loaded]
            shifted = [builder.add(pointer, _LONG(word * self._arithmetic.a_bytes)) for pointer in a_now]
            sums = self._step(sums, shifted, (_LONG(0), a_row, twice), [numbers])
        of_step = _LONG(reader.depth // self._arithmetic.depth * self._arithmetic.a_bytes)
        b_next, a_next = builder.add(b_now, _LONG(reader.step_bytes)), [builder.add(p, of_step) for p in a_now]
        self._next(left, builder.sub(left, _LONG(1)))
        self._next(b_now, b_next)
        for old, new in zip([*a_now, *running], [*a_next, *sums], strict=True):
            self._next(old, new)
        builder.cbranch(builder.icmp_signed(">", left, _LONG(1)), loop, end)
        builder.position_at_end(end)
        return sums, b_next, a_next

    def _ask_for_lines(self, address: Any, num_bytes: int) -> None:
        for line in range(0, num_bytes, _LINE):
            build_prefetch(self._builder, self._builder.add(address, _LONG(line)), self._caches)

    def _spread_float(self, address: Any) -> Any:
        builder, nothing = self._builder, ir.Constant(_FLOATS, ir.Undefined)
        value = builder.load(builder.inttoptr(address, _FLOAT.as_pointer()), align=4)
        single = builder.insert_element(nothing, value, _WORD(0))
        return builder.shuffle_vector(single, nothing, ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES))
