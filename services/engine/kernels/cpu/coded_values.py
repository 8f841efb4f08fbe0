"""The numbers of codes as vectors, which the builders of products of coded panels load."""

from typing import Any

from llvmlite import ir

from services.engine.kernels.cpu.coded_panels import step_bytes, step_depth
from services.engine.kernels.cpu.intrinsics import ISA, call_intrinsic
from services.engine.kernels.cpu.register_tiles import COLUMNS
from services.engine.kernels.cpu.scale_forms import ScaleForm
from services.engine.kernels.cpu.vectors import LANES
from services.engine.quantization.codes import Code

_BYTE, _HALF, _WORD, _LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_WORD, LANES)
_HALVES, _PAIRS = ir.VectorType(_HALF, LANES), ir.VectorType(_HALF, 2 * LANES)
_LOWER_BITS = 0xF  # of a code of 5 or 6 bits, which lie apart from the others
_E4M3_FACTOR = 2.0**8  # of what float16 makes of the bits of E4M3: its exponents begin at -14, E4M3's at -6


class CodeReader:
    """Builds the numbers of 16 columns of a panel: codes' values, without scale and offset."""

    def __init__(self, builder: Any, code: Code, table: Any) -> None:
        """table: address of `CodedPanels.table`."""
        self._builder = builder
        self._code = code
        self._table = table
        self.depth, self.step_bytes = step_depth(code), step_bytes(code)

    def load(self, step: Any, vector: int) -> list[Any]:
        """Loads the codes of a step, at this address, of 16 columns."""
        if self._code.bits == 4:
            return [self._load(step, vector * LANES * 4, _WORDS)]
        if self._code.bits < 8:
            words = self.depth // 8 + 1  # with lower bits, and one with the others
            return [self._load(step, (word * COLUMNS + vector * LANES) * 4, _WORDS) for word in range(words)]
        return [self._load(step, at * COLUMNS + vector * LANES, ir.VectorType(_BYTE, LANES)) for at in range(2)]

    def singles(self, loaded: list[Any], depth: int) -> Any:
        """Returns the numbers at a depth of the step, 16 float32."""
        builder = self._builder
        if self._code.bits == 4:
            return self._of_nibbles(loaded[0], depth // 2 + 4 * (depth % 2))
        if self._code.bits < 8:
            return self._of_planes(loaded, depth)
        if self._code is Code.INT8:
            return builder.sitofp(builder.sext(loaded[depth], _WORDS), _FLOATS)
        bits = builder.shl(builder.sext(loaded[depth], _HALVES), ir.Constant(_HALVES, [7] * LANES))
        bits = builder.and_(bits, ir.Constant(_HALVES, [0xBFFF] * LANES))  # without the sign's copy in the exponent
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), _FLOATS)

    def pairs(self, loaded: list[Any], pair: int) -> Any:
        """Returns the numbers at the depths of a pair of the step, 16 words of two bfloat16. They are exact."""
        builder = self._builder
        if self._code.bits < 8:
            return self._looked_up_pairs(loaded, pair)
        first, second = (builder.bitcast(self.singles(loaded, depth), _WORDS) for depth in range(2))
        return builder.or_(builder.lshr(first, ir.Constant(_WORDS, [16] * LANES)), second)

    def block(self, index: Any, now: Any, earlier: Any, form: ScaleForm, *, has_offsets: bool) -> tuple[Any, Any]:
        """Returns the addresses of a group's block, and of its codes, where scales have two levels.

        index: of the group; now: what follows the group before; earlier: the address of the block of the group before.
        """
        builder = self._builder
        place = builder.urem(index, _LONG(form.block_groups))
        begins = builder.icmp_unsigned("==", place, _LONG(0))
        codes = builder.add(now, _LONG(form.head_bytes(has_offsets=has_offsets)))
        return builder.select(begins, now, earlier), builder.select(begins, codes, now)

    def scale(self, block: Any, scales: Any, form: ScaleForm, vector: int) -> Any:
        """Loads the scales of 16 columns, by which the numbers are to be multiplied."""
        scale = self._of_group(block, scales, form, vector)
        if self._code is Code.E4M3:
            scale = self._builder.fmul(scale, ir.Constant(_FLOATS, [_E4M3_FACTOR] * LANES))
        return scale

    def offset(self, block: Any, offsets: Any, form: ScaleForm, vector: int) -> Any:
        """Loads the offsets of 16 columns."""
        return self._of_group(block, offsets, form, vector, COLUMNS * 2)

    def _of_group(self, block: Any, address: Any, form: ScaleForm, vector: int, of_block: int = 0) -> Any:
        """Loads scales or offsets of 16 columns as float32. of_block: bytes to their float16 in a block."""
        builder, shift = self._builder, vector * LANES * form.dtype.itemsize
        if form.has_two_levels:
            fine = self._load(address, shift, ir.VectorType(_BYTE, LANES))
            widened = builder.sext(fine, _WORDS) if form.dtype.is_signed else builder.zext(fine, _WORDS)
            return builder.fmul(builder.sitofp(widened, _FLOATS), self._halves(block, of_block + vector * LANES * 2))
        if form is ScaleForm.FLOAT32:
            return self._load(address, shift, _FLOATS)
        if form is ScaleForm.FLOAT16:
            return self._halves(address, shift)
        words = builder.zext(self._load(address, shift, _HALVES), _WORDS)
        return builder.bitcast(builder.shl(words, ir.Constant(_WORDS, [16] * LANES)), _FLOATS)

    def _halves(self, address: Any, shift: int) -> Any:
        """Loads 16 float16 as float32."""
        return self._builder.fpext(self._load(address, shift, ir.VectorType(ir.HalfType(), LANES)), _FLOATS)

    def _looked_up_pairs(self, loaded: list[Any], pair: int) -> Any:
        """Looks up numbers in bfloat16, by indices whose further bits have no meaning: of 4 bits, the table has each
        number twice.
        """
        builder, bits, place = self._builder, self._code.bits, 4 << self._code.bits
        if bits == 4:
            words = self._shifted(loaded[0], pair)
        else:
            mask = _LOWER_BITS << 16 | _LOWER_BITS
            words = self._joined(loaded, pair, 0, mask, ~mask)
        indices, table = builder.bitcast(words, _PAIRS), self._load(self._table, place, _PAIRS)
        if bits < 6:
            found = call_intrinsic(builder, "llvm.x86.avx512.permvar.hi.512", _PAIRS, table, indices)
        else:
            upper = self._load(self._table, place + 64, _PAIRS)
            found = call_intrinsic(builder, "llvm.x86.avx512.vpermi2var.hi.512", _PAIRS, table, indices, upper)
        return builder.bitcast(found, _WORDS)

    def _of_planes(self, loaded: list[Any], depth: int) -> Any:
        """Returns the numbers of codes of 5 and 6 bits, 16 float32."""
        builder, bits = self._builder, self._code.bits
        codes = self._joined(loaded, depth // 2, depth % 2, _LOWER_BITS, (1 << bits) - 1 - _LOWER_BITS)
        numbers = builder.sitofp(codes, _FLOATS)
        if self._code is Code.INT6:
            numbers = builder.fadd(numbers, ir.Constant(_FLOATS, [-32.0] * LANES))
        return numbers

    def _joined(self, loaded: list[Any], pair: int, half: int, lower: int, upper: int) -> Any:
        """Returns words with both parts of the codes of a pair, that of one half of a word at bit 0.

        lower, upper: the bits that each part gives.
        """
        builder, per_word = self._builder, 4
        low = self._shifted(loaded[pair // per_word], pair % per_word + per_word * half)
        shift = (self._code.bits - 4) * pair + 16 * half - 4
        by = ir.Constant(_WORDS, [abs(shift)] * LANES)
        high = builder.shl(loaded[-1], by) if shift < 0 else builder.lshr(loaded[-1], by)
        lower_bits, upper_bits = (ir.Constant(_WORDS, [bits] * LANES) for bits in (lower, upper))
        return builder.or_(builder.and_(low, lower_bits), builder.and_(high, upper_bits))

    def _of_nibbles(self, words: Any, nibble: int) -> Any:
        builder, indices = self._builder, self._shifted(words, nibble)
        if ISA.has_avx512:  # which takes the lower four bits of an index
            table = self._load(self._table, 0, _FLOATS)
            return call_intrinsic(builder, "llvm.x86.avx512.permvar.sf.512", _FLOATS, table, indices)
        if self._code is Code.UINT4:
            codes = builder.and_(indices, ir.Constant(_WORDS, [15] * LANES))
            lowest = builder.load(builder.inttoptr(self._table, ir.FloatType().as_pointer()), align=4)
            single = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), lowest, _WORD(0))
            lowest = builder.shuffle_vector(single, single, ir.Constant(_WORDS, [0] * LANES))
            return builder.fadd(builder.sitofp(codes, _FLOATS), lowest)
        return self._looked_up(indices)

    def _looked_up(self, indices: Any) -> Any:
        """Looks up words' lower four bits by AVX2, which has look-ups of three bits for 8 words."""
        builder, half = self._builder, LANES // 2
        floats, halves = ir.VectorType(ir.FloatType(), half), []
        tables = [self._load(self._table, 4 * half * part, floats) for part in range(2)]
        for part in range(2):
            lanes = ir.Constant(ir.VectorType(_WORD, half), list(range(part * half, (part + 1) * half)))
            own = builder.shuffle_vector(indices, indices, lanes)
            low, high = (call_intrinsic(builder, "llvm.x86.avx2.permps", floats, table, own) for table in tables)
            fourth = builder.and_(own, ir.Constant(own.type, [8] * half))
            is_high = builder.icmp_unsigned("!=", fourth, ir.Constant(own.type, [0] * half))
            halves.append(builder.select(is_high, high, low))
        return builder.shuffle_vector(*halves, ir.Constant(_WORDS, list(range(LANES))))

    def _shifted(self, words: Any, nibble: int) -> Any:
        return words if nibble == 0 else self._builder.lshr(words, ir.Constant(_WORDS, [4 * nibble] * LANES))

    def _load(self, address: Any, shift: int, kind: Any) -> Any:
        builder = self._builder
        place = address if shift == 0 else builder.add(address, _LONG(shift))
        return builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)
