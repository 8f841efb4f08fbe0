"""Products of small matrices whose sums stay in registers. Products consist of them, except AMX's and the scores of
single tokens (`decode_products`).

    sums [rows, columns] += a [rows, steps] x b [steps, columns]

    b    step by step, a word of 32 bits for each column; or rows of bfloat16
    a    a word for each row and step, which is spread to all lanes; any number of bytes from row to row and from step
         to step
    sums float32, or of integers int32, which wrap around

`multiply_rows` has 32 columns, steps of b next to each other, and rows of sums 128 bytes apart.

An `Arithmetic` says what a word holds and how words are multiplied:

    PAIRS    two bfloat16 in both, in one instruction
    WIDENED  two bfloat16 in b, converted to float32 before the product; in a two float32
    SINGLES  a float32 in both

and two are for rows of bfloat16 as they lie in the KV pool:

    ROW_PAIRS  a step takes two rows of b, pairs their elements, and goes on as PAIRS
    ROWS       a step takes a row of b, converts it to float32, and goes on as SINGLES

and two are for codes, with a depth of 4 in a step (Intel's manual, volume 2, VPDPBUSD and VPMADDWD):

    BYTES        four uint8 in a, four int8 in b, in one instruction
    SPLIT_BYTES  four int8 in b, of which the first and third, then the second and fourth are converted to int16 and
                 multiplied; in a four int16 in this order

`Isa.tile_rows` rows are multiplied at a time: so many that sums and operands fill the registers. Each word of b that is
loaded then serves all of these rows, and each word of a serves all columns (Goto and van de Geijn 2008, ACM TOMS
34(3)). There is code for each number of rows up to that.
"""

from enum import Enum
from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba import int64, types
from numba.core import cgutils
from numba.extending import intrinsic

from services.engine.kernels.cpu.compiled import MachineCode, compiled
from services.engine.kernels.cpu.intrinsics import (
    ALL_CACHES,
    FOR_SCATTERED,
    HAS_VNNI,
    ISA,
    build_prefetch,
    call_intrinsic,
    njit,
)
from services.engine.kernels.cpu.vectors import LANES, BFloat16s

COLUMNS, STEP_BYTES, ROW_BYTES = 32, 128, 128
_VECTOR_BYTES = 64
_NUM_ARGUMENTS, _LINE = 10, 64
# A product of so few rows waits for its weight, which it prefetches as if that were scattered: a decode step of one row
# took 5.4 to 6.3 ms on an EPYC of Zen 4, and 6.2 to 7.3 with prefetches into all caches (loadtest/results/model.md).
# The bound is the rows of a tile where two are needed for the first time.
_FEW_ROWS = ISA.tile_rows // 2 + 1
_TOGETHER = 3  # rows addressed from one pointer: at it, and at 1 and 2 times the distance from it
_FLOAT, _HALF, _WORD, _LONG = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_WORD, LANES)
BYTES, HALVES = ir.VectorType(ir.IntType(8), 4 * LANES), ir.VectorType(_HALF, 2 * LANES)
_FIRST_LANE = ir.Constant(WORDS, [0] * LANES)


class Arithmetic(Enum):
    """The kinds of products; see above."""

    PAIRS = "pairs"
    WIDENED = "widened"
    SINGLES = "singles"
    ROW_PAIRS = "row pairs"
    ROWS = "rows"
    BYTES = "bytes"
    SPLIT_BYTES = "split bytes"

    @property
    def a_bytes(self) -> int:
        """Returns the bytes of a row of a for each step, where steps lie next to each other."""
        return 8 if self in (Arithmetic.WIDENED, Arithmetic.SPLIT_BYTES) else 4

    @property
    def depth(self) -> int:
        """Returns the depth of a step: the products that it adds to each sum."""
        if self.multiplies_bytes:
            return 4
        return 1 if self in (Arithmetic.SINGLES, Arithmetic.ROWS) else 2

    @property
    def takes_rows(self) -> bool:
        """Returns True if b has rows of bfloat16, not of words."""
        return self in (Arithmetic.ROW_PAIRS, Arithmetic.ROWS)

    @property
    def multiplies_pairs(self) -> bool:
        """Returns True if one instruction multiplies pairs of bfloat16."""
        return self in (Arithmetic.PAIRS, Arithmetic.ROW_PAIRS)

    @property
    def multiplies_bytes(self) -> bool:
        """Returns True if b has int8 and sums are int32."""
        return self in (Arithmetic.BYTES, Arithmetic.SPLIT_BYTES)


def arithmetic_of(dtype: str) -> Arithmetic:
    """Returns the arithmetic for a weight of this dtype, bfloat16 or float32."""
    if dtype == "float32":
        return Arithmetic.SINGLES
    return Arithmetic.PAIRS if ISA.has_bfloat16 else Arithmetic.WIDENED


def arithmetic_of_codes() -> Arithmetic:
    """Returns the arithmetic for weights of int8."""
    return Arithmetic.BYTES if HAS_VNNI else Arithmetic.SPLIT_BYTES


@cache
def multiply_rows(arithmetic: Arithmetic, columns: int = COLUMNS) -> Any:
    """Makes a function that kernels call. columns: so many of the 32 are multiplied, 16 or 32.

    Its arguments: rows; address of a, bytes from row to row and from step to step; address of b; steps, at least 1;
    address of sums; True if sums start from 0, False if the products are added to them; an address and bytes for
    prefetching: each step prefetches two cache lines at the address, which then rises by these bytes.
    """
    call_tile, most = _make_call(_tile_function(arithmetic, columns)), ISA.tile_rows

    @njit
    def multiply(
        rows: int,
        a: int,
        a_row: int,
        a_step: int,
        b: int,
        steps: int,
        sums: int,
        afresh: bool,
        ahead: int,
        ahead_step: int,
    ) -> None:
        """Multiplies the rows in tiles of about the same size."""
        tiles = (rows + most - 1) // most
        begin = 0
        for tile in range(tiles):
            end = (tile + 1) * rows // tiles
            of_tile, into = a + begin * a_row, sums + begin * ROW_BYTES
            call_tile(end - begin, of_tile, a_row, a_step, b, steps, into, afresh, ahead, ahead_step)
            begin = end

    return multiply


@cache
def _tile_function(arithmetic: Arithmetic, columns: int = COLUMNS) -> MachineCode:
    """Makes a C function for at most `Isa.tile_rows` rows, compiled once for all kernels that call it."""
    return _make_tile_function(arithmetic, columns)


@compiled(*[int64] * _NUM_ARGUMENTS)
def _make_tile_function(arithmetic: Arithmetic, columns: int) -> Any:
    tile = _tile(arithmetic, columns // LANES)

    def function(
        rows: int,
        a: int,
        a_row: int,
        a_step: int,
        b: int,
        steps: int,
        sums: int,
        afresh: int,
        ahead: int,
        ahead_step: int,
    ) -> None:
        tile(rows, a, a_row, a_step, b, steps, sums, afresh, ahead, ahead_step)

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
        _a_step: Any,
        _b: Any,
        _steps: Any,
        _sums: Any,
        _afresh: Any,
        _ahead: Any,
        _ahead_step: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            *values, afresh, ahead, ahead_step = arguments
            function_type = ir.FunctionType(ir.VoidType(), [_LONG] * _NUM_ARGUMENTS)
            function = cgutils.get_or_insert_function(builder.module, function_type, symbol)
            builder.call(function, [*values, builder.zext(afresh, _LONG), ahead, ahead_step])
            return context.get_dummy_value()

        return types.void(*[int64] * 7, types.boolean, int64, int64), generate

    return call_tile


def _tile(arithmetic: Arithmetic, num_vectors: int) -> Any:
    at_once = min(num_vectors, ISA.tile_vectors)

    @intrinsic
    def tile(
        _context: Any,
        _rows: Any,
        _a: Any,
        _a_row: Any,
        _a_step: Any,
        _b: Any,
        _steps: Any,
        _sums: Any,
        _afresh: Any,
        _ahead: Any,
        _ahead_step: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            rows, a, a_row, a_step, b, *others = arguments
            done = builder.append_basic_block("done")
            switch = builder.switch(rows, done)
            for count in range(1, ISA.tile_rows + 1):
                block = builder.append_basic_block(f"rows_{count}")
                switch.add_case(_LONG(count), block)
                builder.position_at_end(block)
                tile = TileBuilder(
                    builder,
                    arithmetic,
                    count,
                    caches=FOR_SCATTERED if count <= _FEW_ROWS else ALL_CACHES,
                    vectors=at_once,
                )
                for vector in range(0, num_vectors, at_once):
                    tile.build(vector, a, a_row, a_step, b, _LONG(STEP_BYTES), *others)
                builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*[int64] * _NUM_ARGUMENTS), generate

    return tile


class TileBuilder:
    """Builds the loop over the steps for one number of rows and some vectors of columns."""

    def __init__(
        self,
        builder: Any,
        arithmetic: Arithmetic,
        rows: int,
        *,
        caches: int,
        vectors: int = ISA.tile_vectors,
        row_bytes: int = ROW_BYTES,
        ahead_bytes: int = STEP_BYTES,
    ) -> None:
        """row_bytes: from a row of sums to the next. ahead_bytes: prefetched in each step, into `caches`."""
        self._builder = builder
        self._arithmetic = arithmetic
        self._sum_type = WORDS if arithmetic.multiplies_bytes else _FLOATS
        self._rows = rows
        self._vectors = vectors
        self._row_bytes = row_bytes
        self._ahead_bytes = ahead_bytes
        self._caches = caches

    def build(
        self,
        vector: int,
        a: Any,
        a_row: Any,
        a_step: Any,
        b: Any,
        b_step: Any,
        steps: Any,
        sums: Any,
        afresh: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> None:
        """Builds the loop. vector: the index of the first vector of columns."""
        builder, shift = self._builder, vector * _VECTOR_BYTES
        sums = builder.add(sums, _LONG(shift))
        b = builder.add(b, _LONG(shift // 2 if self._arithmetic.takes_rows else shift))
        before = self._sums_before(sums, builder.icmp_unsigned("!=", afresh, _LONG(0)))
        pointers = [builder.add(a, builder.mul(a_row, _LONG(row))) for row in range(0, self._rows, _TOGETHER)]
        twice = builder.shl(a_row, _LONG(1))
        entry, loop, end = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        left = self._running(steps, entry)
        b_now, ahead_now = self._running(b, entry), self._running(ahead, entry)
        a_now = [self._running(pointer, entry) for pointer in pointers]
        running = [self._running(value, entry) for value in before]
        self._ask_for(ahead_now)
        after = self._step(running, a_now, (_LONG(0), a_row, twice), self._load_b(b_now, b_step))
        self._next(left, builder.sub(left, _LONG(1)))
        self._next(b_now, builder.add(b_now, b_step))
        self._next(ahead_now, builder.add(ahead_now, ahead_step))
        for pointer in a_now:
            self._next(pointer, builder.add(pointer, a_step))
        for old, new in zip(running, after, strict=True):
            self._next(old, new)
        builder.cbranch(builder.icmp_signed(">", left, _LONG(1)), loop, end)
        builder.position_at_end(end)
        for value, place in zip(after, self._places(sums), strict=True):
            builder.store(value, place, align=4)

    def _running(self, value: Any, entry: Any) -> Any:
        """Makes a value of the loop that begins as `value`."""
        running = self._builder.phi(value.type)
        running.add_incoming(value, entry)
        return running

    def _next(self, running: Any, value: Any) -> None:
        running.add_incoming(value, self._builder.block)

    def _ask_for(self, address: Any) -> None:
        for line in range(0, self._ahead_bytes, _LINE):
            build_prefetch(self._builder, self._builder.add(address, _LONG(line)), self._caches)

    def _places(self, sums: Any) -> list[Any]:
        builder = self._builder
        shifts = [r * self._row_bytes + v * _VECTOR_BYTES for r in range(self._rows) for v in range(self._vectors)]
        pointer = self._sum_type.as_pointer()
        return [builder.inttoptr(builder.add(sums, _LONG(shift)), pointer) for shift in shifts]

    def _sums_before(self, sums: Any, afresh: Any) -> list[Any]:
        builder, places = self._builder, self._places(sums)
        entry, load, begin = builder.block, builder.append_basic_block("load"), builder.append_basic_block("begin")
        builder.cbranch(afresh, begin, load)
        builder.position_at_end(load)
        loaded = [builder.load(place, align=4) for place in places]
        builder.branch(begin)
        builder.position_at_end(begin)
        values = [self._running(ir.Constant(self._sum_type, [0] * LANES), entry) for _ in places]
        for value, from_memory in zip(values, loaded, strict=True):
            value.add_incoming(from_memory, load)
        return values

    def _load_b(self, b: Any, b_step: Any) -> list[list[Any]]:
        """Returns the operands of a step, to be multiplied one after the other: vectors of words, or of float32."""
        builder, vectors = self._builder, self._vectors
        if self._arithmetic is Arithmetic.ROW_PAIRS:
            return [self._pairs(b, builder.add(b, builder.ashr(b_step, _LONG(1))))]
        if self._arithmetic is Arithmetic.ROWS:
            loads = [builder.add(b, _LONG(v * LANES * 2)) for v in range(vectors)]
            return [[self._widened(builder.zext(self._load(at, _HALF, LANES), WORDS), upper=False) for at in loads]]
        words = [self._load(builder.add(b, _LONG(v * _VECTOR_BYTES)), _WORD, LANES) for v in range(vectors)]
        if self._arithmetic in (Arithmetic.PAIRS, Arithmetic.BYTES):
            return [words]
        if self._arithmetic is Arithmetic.SPLIT_BYTES:
            return [[self._split_bytes(word, upper=upper) for word in words] for upper in (False, True)]
        if self._arithmetic is Arithmetic.SINGLES:
            return [[builder.bitcast(word, _FLOATS) for word in words]]
        return [[self._widened(word, upper=upper) for word in words] for upper in (False, True)]

    def _load(self, address: Any, element: Any, count: int) -> Any:
        return self._builder.load(self._builder.inttoptr(address, ir.VectorType(element, count).as_pointer()), align=2)

    def _widened(self, words: Any, *, upper: bool) -> Any:
        """Converts one bfloat16 of each word to float32."""
        builder = self._builder
        if upper:
            bits = builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * LANES))
        else:
            bits = builder.shl(words, ir.Constant(WORDS, [16] * LANES))
        return builder.bitcast(bits, _FLOATS)

    def _split_bytes(self, words: Any, *, upper: bool) -> Any:
        """Converts the first and third int8 of each word to int16, or the second and fourth."""
        builder, bits = self._builder, ir.Constant(HALVES, [8] * 2 * LANES)
        halves = builder.bitcast(words, HALVES)
        return builder.ashr(halves if upper else builder.shl(halves, bits), bits)

    def _pairs(self, first: Any, second: Any) -> list[Any]:
        """Pairs the elements of two rows at these addresses: vectors of words."""
        builder, pairs = self._builder, []
        for begin in range(0, self._vectors * LANES, 2 * LANES):
            count = min(2 * LANES, self._vectors * LANES - begin)
            rows = [self._load(builder.add(row, _LONG(begin * 2)), _HALF, count) for row in (first, second)]
            for start in range(0, count, LANES):
                lanes = [lane + row for lane in range(start, start + LANES) for row in (0, count)]
                order = ir.Constant(ir.VectorType(_WORD, 2 * LANES), lanes)
                pairs.append(builder.bitcast(builder.shuffle_vector(*rows, order), WORDS))
        return pairs

    def _step(self, sums: list[Any], a: list[Any], shifts: tuple[Any, ...], b: list[list[Any]]) -> list[Any]:
        builder, vectors, sums = self._builder, self._vectors, list(sums)
        for part, columns in enumerate(b):
            for row in range(self._rows):
                number, shift = divmod(row, _TOGETHER)
                word = self._spread(builder.add(builder.add(a[number], shifts[shift]), _LONG(4 * part)))
                for v in range(vectors):
                    at = row * vectors + v
                    sums[at] = self._multiply_add(word, columns[v], sums[at])
        return sums

    def _spread(self, address: Any) -> Any:
        builder = self._builder
        is_word = self._arithmetic.multiplies_pairs or self._arithmetic.multiplies_bytes
        kind = WORDS if is_word else _FLOATS
        word = builder.load(builder.inttoptr(address, kind.element.as_pointer()), align=2)
        nothing = ir.Constant(kind, ir.Undefined)
        return builder.shuffle_vector(builder.insert_element(nothing, word, _WORD(0)), nothing, _FIRST_LANE)

    def _multiply_add(self, a: Any, b: Any, sums: Any) -> Any:
        builder = self._builder
        if self._arithmetic.multiplies_pairs:
            pairs = BFloat16s(2 * LANES)
            a, b = builder.bitcast(a, pairs), builder.bitcast(b, pairs)
            return call_intrinsic(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, sums, a, b)
        if self._arithmetic is Arithmetic.BYTES:
            a, b = builder.bitcast(a, BYTES), builder.bitcast(b, BYTES)
            return call_intrinsic(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, sums, a, b)
        if self._arithmetic is Arithmetic.SPLIT_BYTES:
            return builder.add(sums, multiply_halves(builder, builder.bitcast(a, HALVES), b))
        return call_intrinsic(builder, "llvm.fma.v16f32", _FLOATS, a, b, sums)


def multiply_halves(builder: Any, first: Any, second: Any) -> Any:
    """Builds the sums of the products of two neighbours each, int16[32] to int32[16]."""
    if ISA.has_avx512:
        return call_intrinsic(builder, "llvm.x86.avx512.pmaddw.d.512", WORDS, first, second)
    half = ir.VectorType(_WORD, LANES // 2)
    parts = []
    for begin in (0, LANES):
        lanes = ir.Constant(ir.VectorType(_WORD, LANES), list(range(begin, begin + LANES)))
        both = [builder.shuffle_vector(value, value, lanes) for value in (first, second)]
        parts.append(call_intrinsic(builder, "llvm.x86.avx2.pmadd.wd", half, *both))
    return builder.shuffle_vector(*parts, ir.Constant(WORDS, list(range(LANES))))
