"""Matrices that are stored as codes of few bits, with a scale for some numbers at a time.

    number[o, i] = scales[o, i // group] * value(codes[o, i]) + offsets[o, i // group]

Every way of storing that kernels multiply is brought to this one form, once, when a model is loaded: whoever reads
files knows no kernels, and kernels know no files.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

import torch
from torch import Tensor

_SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Code(Enum):
    """The kinds of codes, by what a code means."""

    UINT4 = "uint4"  # 0 to 15
    INT8 = "int8"  # two's complement
    E4M3 = "e4m3"  # float8_e4m3fn
    E2M1 = "e2m1"  # sign, two bits of exponent, one of mantissa (Open Compute Project 2023, MX formats 1.0)

    @property
    def bits(self) -> int:
        """Returns the bits of a code."""
        return 4 if self in (Code.UINT4, Code.E2M1) else 8

    def values(self) -> Tensor:
        """Returns the number that each code means, float32[16] or float32[256]."""
        return _values(self)


@cache
def _values(code: Code) -> Tensor:
    if code is Code.UINT4:
        return torch.arange(16, dtype=torch.float32)
    if code is Code.E2M1:
        positive = torch.tensor(_E2M1)
        return torch.cat((positive, -positive))
    codes = torch.arange(256, dtype=torch.uint8)
    return codes.view(torch.int8 if code is Code.INT8 else torch.float8_e4m3fn).to(torch.float32)


class Inputs(Enum):
    """The ways in which a product rounds what a matrix is multiplied with."""

    AS_THEY_ARE = "as they are"
    INT8 = "int8"  # to codes of -127 to 127, with a scale for each row
    E4M3 = "e4m3"  # to codes of e4m3, with a scale for each row
    E4M3_GROUPS = "e4m3 by groups"  # to codes of e4m3, with a scale for each of the matrix's groups in a row


@dataclass(frozen=True, slots=True, eq=False)
class CodedMatrix:
    """A weight [out, in]. Whoever is given one takes it over."""

    code: Code
    codes: Tensor  # uint8[out, in], a code in each byte
    scales: Tensor  # float32, float16 or bfloat16 [out, groups]
    offsets: Tensor | None  # of the dtype of the scales, [out, groups]
    group: int  # numbers of a row with the same scale; the last group may have fewer
    order: Tensor | None = None  # int64[in]: codes[:, i] belongs to input order[i]; None: to input i
    inputs: Inputs = Inputs.AS_THEY_ARE
    input_scale: float | None = None  # of codes of inputs, if it is not one for each row that follows from the row

    def __post_init__(self) -> None:
        out, depth = self.codes.shape
        groups = (out, -(-depth // self.group))
        assert self.codes.dtype == torch.uint8, self.codes.dtype
        assert self.scales.dtype in _SCALE_DTYPES, self.scales.dtype
        assert self.scales.shape == groups, (self.scales.shape, groups)
        assert self.offsets is None or (self.offsets.dtype, self.offsets.shape) == (self.scales.dtype, groups)
        assert self.order is None or self.order.shape == (depth,)
        assert self.input_scale is None or (self.inputs is Inputs.INT8 and self.input_scale > 0)

    @property
    def shape(self) -> tuple[int, int]:
        """Returns [out, in]."""
        out, depth = self.codes.shape
        return out, depth

    @property
    def nbytes(self) -> int:
        """Returns the bytes of codes, packed, and of scales and offsets."""
        of_scales: int = self.scales.nbytes * (1 if self.offsets is None else 2)
        of_codes: int = self.codes.nbytes * self.code.bits // 8
        return of_codes + of_scales

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix in numbers, [out, in]. Each is computed in float32 and rounded once."""
        numbers = self.code.values().to(self.codes.device)[self.codes.int()]
        numbers *= self._spread(self.scales)
        if self.offsets is not None:
            numbers += self._spread(self.offsets)
        if self.order is not None:
            ordered = torch.empty_like(numbers)
            ordered[:, self.order] = numbers
            numbers = ordered
        return numbers.to(dtype)

    def _spread(self, of_groups: Tensor) -> Tensor:
        """Returns a number of each group for each code, float32[out, in]."""
        return of_groups.to(torch.float32).repeat_interleave(self.group, dim=1)[:, : self.shape[1]]

    def is_like(self, other: "CodedMatrix") -> bool:
        """Returns True if the two can be one matrix, one below the other."""
        same_order = self.order is other.order or (
            self.order is not None and other.order is not None and torch.equal(self.order, other.order)
        )
        return same_order and _kind(self) == _kind(other)

    def to(self, device: torch.device) -> "CodedMatrix":
        """Returns the matrix in memory of this device."""
        own = (self.codes, self.scales, self.offsets, self.order)
        codes, scales, offsets, order = (None if tensor is None else tensor.to(device) for tensor in own)
        assert codes is not None
        assert scales is not None
        return replace(self, codes=codes, scales=scales, offsets=offsets, order=order)

    @property
    def form(self) -> str:
        """Returns the way of storing, in words."""
        groups = "for each row" if self.group >= self.shape[1] else f"for {self.group} numbers"
        return f"{self.code.value} with a scale {groups}"

    def rows(self, begin: int, end: int, step: int = 1) -> "CodedMatrix":
        """Returns these rows, which share the memory."""
        own = slice(begin, end, step)
        offsets = None if self.offsets is None else self.offsets[own]
        return replace(self, codes=self.codes[own], scales=self.scales[own], offsets=offsets)


def _kind(matrix: CodedMatrix) -> tuple[object, ...]:
    of_inputs = matrix.inputs, matrix.input_scale, matrix.shape[1]
    return matrix.code, matrix.group, matrix.scales.dtype, matrix.offsets is None, *of_inputs


def stacked(matrices: Iterable[CodedMatrix]) -> tuple[CodedMatrix, ...]:
    """Puts matrices one below the other, in their order: neighbours that are alike become one."""
    runs: list[list[CodedMatrix]] = []
    for matrix in matrices:
        if runs and runs[-1][0].is_like(matrix):
            runs[-1].append(matrix)
        else:
            runs.append([matrix])
    return tuple(run[0] if len(run) == 1 else _joined(run) for run in runs)


def _joined(matrices: Sequence[CodedMatrix]) -> CodedMatrix:
    offsets = [matrix.offsets for matrix in matrices if matrix.offsets is not None]
    return replace(
        matrices[0],
        codes=torch.cat([matrix.codes for matrix in matrices]),
        scales=torch.cat([matrix.scales for matrix in matrices]),
        offsets=torch.cat(offsets) if offsets else None,
    )
