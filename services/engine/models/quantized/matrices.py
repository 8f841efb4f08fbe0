"""The stored tensors of a quantized layer as codes and scales, for any rows and columns of its weight [out, in]."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.engine.quantization.codes import Code, CodedMatrix, Inputs
from services.engine.quantization.float_layers import Float8Layer
from services.engine.quantization.int_layers import AwqLayer, CompressedInts, GptqLayer
from services.engine.quantization.packed_ints import (
    as_codes,
    offsets_of,
    unpacked,
    unpacked_by_turns,
    with_group_of_each,
)
from services.engine.quantization.schemes import LayerScheme, Per

# Reads tensor[rows, columns] of a layer, by the end of its name; None: all of them. Of one that is not there it returns
# None.
ReadPart = Callable[[str, slice | None, slice | None], Tensor | None]

_NUMBERS_AT_ONCE = 1 << 20  # made at once; so few stay in the processor's caches until they are cast


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """Some rows of a stored weight, and some of its columns."""

    code: Code
    codes: Tensor  # uint8[rows, columns]
    scales: Tensor  # [rows, groups], of all groups of the rows
    offsets: Tensor | None  # of the scales' shape and dtype
    group: int  # columns with one scale; of one group for each row: all
    columns: range  # of the weight
    groups: Tensor | None  # int64[columns]: the group of each, if they are not one after the other
    inputs: Inputs

    def coded(self, depth: int) -> CodedMatrix | None:
        """Returns the codes; None: the columns do not begin and end with a group, or share groups with others."""
        if self.groups is not None:
            if len(self.columns) != depth:
                return None
            ordered = with_group_of_each(self.code, self.codes, self.scales, self.offsets, self.groups, self.group)
            return None if ordered is None else replace(ordered, inputs=self.inputs)
        if self.scales.shape[1] == 1:
            return self._matrix(slice(None), slice(0, 1), max(1, len(self.columns)))
        begin, end = self.columns.start, self.columns.stop
        if begin % self.group or (end % self.group and end != depth) or begin == end:
            return None
        return self._matrix(slice(None), slice(begin // self.group, -(-end // self.group)), self.group)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Returns the numbers, [rows, columns], computed some rows at a time."""
        numbers = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        if not numbers.numel():
            return numbers
        step = max(1, _NUMBERS_AT_ONCE // len(self.columns))
        of_column = self._of_column()
        for first in range(0, len(numbers), step):
            rows = slice(first, first + step)
            groups: slice | Tensor = slice(0, 1) if of_column is None else of_column
            piece = self._matrix(rows, groups, len(self.columns) if of_column is None else 1)
            numbers[rows] = piece.numbers(dtype)
        return numbers

    def _of_column(self) -> Tensor | None:
        """Returns the group of each column, int64[columns]; None: there is one."""
        if self.groups is not None or self.scales.shape[1] == 1:
            return self.groups
        return torch.arange(self.columns.start, self.columns.stop, device=self.codes.device) // self.group

    def _matrix(self, rows: slice, groups: slice | Tensor, group: int) -> CodedMatrix:
        offsets = None if self.offsets is None else self.offsets[rows][:, groups]
        return CodedMatrix(
            self.code, self.codes[rows], self.scales[rows][:, groups], offsets, group, inputs=self.inputs
        )


def stored_shape(layer: LayerScheme, codes: tuple[int, ...], part: ReadPart) -> tuple[int, int]:
    """Returns [out, in] of a weight whose stored codes have this shape."""
    first, second = codes
    match layer:
        case AwqLayer():
            return second * 8, first
        case GptqLayer():
            return second, first * 32 // layer.bits
        case CompressedInts() if layer.is_packed:
            _, depth = _there(part(".weight_shape", None, None)).tolist()
            return first, depth
    return first, second


def stored_matrix(layer: LayerScheme, part: ReadPart, rows: range, columns: range, depth: int) -> StoredMatrix:
    """Reads the codes of these rows and columns, and the scales of the rows, of a weight with so many inputs."""
    match layer:
        case AwqLayer():
            return _awq(layer, part, rows, columns, depth)
        case GptqLayer():
            return _gptq(layer, part, rows, columns, depth)
        case CompressedInts():
            return _compressed(layer, part, rows, columns, depth)
        case Float8Layer():
            return _float8(layer, part, rows, columns, depth)
    raise AssertionError(layer)


def _awq(layer: AwqLayer, part: ReadPart, rows: range, columns: range, depth: int) -> StoredMatrix:
    words, within = _words_around(rows, 8)
    codes = unpacked_by_turns(_there(part(".qweight", _slice(columns), words)))[:, within].T.contiguous()
    zeros = unpacked_by_turns(_there(part(".qzeros", None, words)))[:, within].T.to(torch.int32)
    scales, offsets = offsets_of(4, _there(part(".scales", None, _slice(rows))).T.contiguous(), zeros)
    group = depth if layer.group is None else layer.group
    return StoredMatrix(Code.UINT4, codes, scales, offsets, group, columns, None, Inputs.AS_THEY_ARE)


def _gptq(layer: GptqLayer, part: ReadPart, rows: range, columns: range, depth: int) -> StoredMatrix:
    """Zero points are stored less one in the first version of the format, whose 15 so means 16, as in ExLlama."""
    of_word = 32 // layer.bits
    words, within = _words_around(columns, of_word)
    unsigned = unpacked(_there(part(".qweight", words, _slice(rows))), layer.bits, 0)[within].T.contiguous()
    zeros = None
    if not layer.is_symmetric:
        words, within = _words_around(rows, of_word)
        stored = unpacked(_there(part(".qzeros", None, words)), layer.bits, 1)[:, within].T
        zeros = stored.to(torch.int32) + layer.zero_shift
    code, codes = as_codes(layer.bits, unsigned)
    scales, offsets = offsets_of(layer.bits, _there(part(".scales", None, _slice(rows))).T.contiguous(), zeros)
    groups = _there(part(".g_idx", _slice(columns), None)).to(torch.int64) if layer.is_ordered else None
    group = depth if layer.group is None else layer.group
    return StoredMatrix(code, codes, scales, offsets, group, columns, groups, Inputs.AS_THEY_ARE)


def _compressed(layer: CompressedInts, part: ReadPart, rows: range, columns: range, depth: int) -> StoredMatrix:
    inputs = Inputs.INT8 if layer.int8_inputs else Inputs.AS_THEY_ARE
    scales = _of_rows(layer.per, _there(part(".weight_scale", *_rows_of(layer.per, rows))), len(rows))
    zeros = None if layer.is_symmetric else _compressed_zeros(layer, part, rows)
    if layer.is_packed:
        words, within = _words_around(columns, 32 // layer.bits)
        packed = unpacked(_there(part(".weight_packed", _slice(rows), words)), layer.bits, 1)
        code, codes = as_codes(layer.bits, packed[:, within].contiguous())
    else:
        code, codes = Code.INT8, _there(part(".weight", _slice(rows), _slice(columns))).view(torch.uint8)
    scales, offsets = offsets_of(layer.bits, scales, zeros)
    groups = _there(part(".weight_g_idx", _slice(columns), None)).to(torch.int64) if layer.is_ordered else None
    group = depth if layer.group is None else layer.group
    return StoredMatrix(code, codes, scales, offsets, group, columns, groups, inputs)


def _compressed_zeros(layer: CompressedInts, part: ReadPart, rows: range) -> Tensor:
    """Returns zero points as those of unsigned numbers, int32[rows, groups]."""
    middle = 1 << (layer.bits - 1)
    if not layer.is_packed or layer.per is Per.TENSOR:
        stored = _there(part(".weight_zero_point", *_rows_of(layer.per, rows)))
        return _of_rows(layer.per, stored, len(rows)).to(torch.int32) + middle
    words, within = _words_around(rows, 32 // layer.bits)
    return unpacked(_there(part(".weight_zero_point", words, None)), layer.bits, 0)[within].to(torch.int32)


def _float8(layer: Float8Layer, part: ReadPart, rows: range, columns: range, depth: int) -> StoredMatrix:
    codes = _there(part(".weight", _slice(rows), _slice(columns))).view(torch.uint8)
    stored = next(found for end in layer.scale_ends if (found := part(end, None, None)) is not None)
    group, inputs = depth, Inputs.E4M3 if layer.float8_inputs else Inputs.AS_THEY_ARE
    if layer.block is not None:
        inputs = Inputs.E4M3_GROUPS if layer.float8_inputs else inputs
        high, group = layer.block
        scales = stored[[row // high for row in rows]]
    else:
        per = Per.TENSOR if stored.numel() == 1 else Per.ROW
        scales = _of_rows(per, stored if per is Per.TENSOR else stored[_slice(rows)], len(rows))
    return StoredMatrix(Code.E4M3, codes, scales, None, group, columns, None, inputs)


def _rows_of(per: Per, rows: range) -> tuple[slice | None, slice | None]:
    """Returns the part to read of numbers for each row, or for all."""
    return (None if per is Per.TENSOR else _slice(rows)), None


def _of_rows(per: Per, stored: Tensor, num_rows: int) -> Tensor:
    """Returns numbers of each row, [rows, groups]."""
    if per is Per.TENSOR:
        return stored.reshape(1, 1).expand(num_rows, 1).contiguous()
    return stored[:, None] if stored.dim() == 1 else stored


def _words_around(places: range, of_word: int) -> tuple[slice, slice]:
    """Returns the words that have these places, and where the places are in what they are unpacked to."""
    first = places.start // of_word
    words = slice(first, max(first, -(-places.stop // of_word)))
    return words, slice(places.start - first * of_word, places.stop - first * of_word)


def _slice(places: range) -> slice:
    return slice(places.start, places.stop)


def _there(stored: Tensor | None) -> Tensor:
    assert stored is not None
    return stored
