"""Matrices that are stored as codes of few bits, with a scale for some numbers at a time.

    number[o, i] = scales[o, i // group] * value(codes[o, i]) + offsets[o, i // group]

Scales and offsets may have two levels: integers, each of which is multiplied with a float16 for several groups.

Every way of storing that kernels multiply is brought to this one form, once, when a model is loaded: whoever reads
files knows no kernels, and kernels know no files.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

import torch
from torch import Tensor

_SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FINE_DTYPES = (torch.int8, torch.uint8)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Code(Enum):
    """The kinds of codes, by what a code means."""

    UINT4 = "uint4"  # 0 to 15
    UINT5 = "uint5"  # 0 to 31
    INT6 = "int6"  # -32 to 31, as 0 to 63
    INT8 = "int8"  # two's complement
    E4M3 = "e4m3"  # float8_e4m3fn
    E2M1 = "e2m1"  # sign, two bits of exponent, one of mantissa (Open Compute Project 2023, MX formats 1.0)

    @property
    def bits(self) -> int:
        """Returns the bits of a code."""
        return _BITS.get(self, 8)

    def values(self) -> Tensor:
        """Returns the number that each code means, float32[16] or float32[256]."""
        return _values(self)


_BITS = {Code.UINT4: 4, Code.E2M1: 4, Code.UINT5: 5, Code.INT6: 6}


@cache
def _values(code: Code) -> Tensor:
    if code in (Code.UINT4, Code.UINT5):
        return torch.arange(2**code.bits, dtype=torch.float32)
    if code is Code.INT6:
        return torch.arange(-32, 32, dtype=torch.float32)
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
class CoarseScales:
    """The upper level of scales and offsets of two levels."""

    scales: Tensor  # float16[out, blocks]
    offsets: Tensor | None  # float16[out, blocks]
    groups: int  # of a block; the last block may have fewer


@dataclass(frozen=True, slots=True, eq=False)
class CodedMatrix:
    """A weight [out, in]. Whoever is given one takes it over."""

    code: Code
    codes: Tensor  # uint8[out, in], a code in each byte
    scales: Tensor  # [out, groups], float32, float16 or bfloat16; below coarse ones int8 or uint8
    offsets: Tensor | None  # of the dtype of the scales, [out, groups]
    group: int  # numbers of a row with the same scale; the last group may have fewer
    order: Tensor | None = None  # int64[in]: codes[:, i] belongs to input order[i]; None: to input i
    inputs: Inputs = Inputs.AS_THEY_ARE
    coarse: CoarseScales | None = None  # what scales and offsets are multiplied with

    def __post_init__(self) -> None:
        out, depth = self.codes.shape
        groups = (out, -(-depth // self.group))
        assert self.codes.dtype == torch.uint8, self.codes.dtype
        assert self.scales.dtype in (_SCALE_DTYPES if self.coarse is None else _FINE_DTYPES), self.scales.dtype
        assert self.scales.shape == groups, (self.scales.shape, groups)
        assert self.offsets is None or (self.offsets.dtype, self.offsets.shape) == (self.scales.dtype, groups)
        assert self.order is None or self.order.shape == (depth,)
        if self.coarse is not None:
            blocks = (torch.float16, (out, -(-groups[1] // self.coarse.groups)))
            of_blocks = self.coarse.scales, self.coarse.offsets
            assert all(part is None or (part.dtype, part.shape) == blocks for part in of_blocks)
            assert (self.offsets is None) == (self.coarse.offsets is None)

    @property
    def shape(self) -> tuple[int, int]:
        """Returns [out, in]."""
        out, depth = self.codes.shape
        return out, depth

    @property
    def nbytes(self) -> int:
        """Returns the bytes of codes, packed, and of scales and offsets."""
        coarse = () if self.coarse is None else (self.coarse.scales, self.coarse.offsets)
        of_scales: int = sum(part.nbytes for part in (self.scales, self.offsets, *coarse) if part is not None)
        of_codes: int = self.codes.nbytes * self.code.bits // 8
        return of_codes + of_scales

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix in numbers, [out, in]. Each is computed in float32 and rounded once."""
        numbers = self.code.values().to(self.codes.device)[self.codes.int()]
        one_level = self.with_one_level()
        numbers *= self._spread(one_level.scales)
        if one_level.offsets is not None:
            numbers += self._spread(one_level.offsets)
        if self.order is not None:
            ordered = torch.empty_like(numbers)
            ordered[:, self.order] = numbers
            numbers = ordered
        return numbers.to(dtype)

    def _spread(self, of_groups: Tensor) -> Tensor:
        """Returns a number of each group for each code, float32[out, in]."""
        return of_groups.to(torch.float32).repeat_interleave(self.group, dim=1)[:, : self.shape[1]]

    def with_one_level(self) -> "CodedMatrix":
        """Returns the matrix with scales and offsets of one level: instead of two levels float32, which has their
        products exactly.
        """
        if (coarse := self.coarse) is None:
            return self

        def products(fine: Tensor, of_blocks: Tensor) -> Tensor:
            spread = of_blocks.to(torch.float32).repeat_interleave(coarse.groups, dim=1)
            return spread[:, : fine.shape[1]] * fine

        scales = products(self.scales, coarse.scales)
        offsets = None
        if self.offsets is not None and coarse.offsets is not None:
            offsets = products(self.offsets, coarse.offsets)
        return replace(self, scales=scales, offsets=offsets, coarse=None)

    def with_simple_codes(self) -> "CodedMatrix":
        """Returns the matrix with codes of 4 or 8 bits: instead of 5 and 6 bits INT8."""
        if self.code.bits in (4, 8):
            return self
        codes = self.codes - 32 if self.code is Code.INT6 else self.codes  # two's complement, modulo 256
        return replace(self, code=Code.INT8, codes=codes)

    def is_like(self, other: "CodedMatrix") -> bool:
        """Returns True if the two can be one matrix, one below the other."""
        same_order = self.order is other.order or (
            self.order is not None and other.order is not None and torch.equal(self.order, other.order)
        )
        return same_order and _kind(self) == _kind(other)

    def to(self, device: torch.device) -> "CodedMatrix":
        """Returns the matrix in memory of this device."""
        order = None if self.order is None else self.order.to(device)
        return replace(self.by_rows(lambda rows: rows.to(device)), order=order)

    @property
    def form(self) -> str:
        """Returns the way of storing, in words."""
        groups = "for each row" if self.group >= self.shape[1] else f"for {self.group} numbers"
        times = "" if self.coarse is None else f", times one for {self.coarse.groups * self.group}"
        return f"{self.code.value} with a scale {groups}{times}"

    def rows(self, begin: int, end: int, step: int = 1) -> "CodedMatrix":
        """Returns these rows, which share the memory."""
        return self.by_rows(lambda rows: rows[begin:end:step])

    def by_rows(self, change: Callable[[Tensor], Tensor]) -> "CodedMatrix":
        """Returns a matrix of other rows. change: makes them of any tensor that has a row for each of the matrix."""
        codes, scales = change(self.codes), change(self.scales)
        offsets = None if self.offsets is None else change(self.offsets)
        coarse = self.coarse
        if coarse is not None:
            coarse_offsets = None if coarse.offsets is None else change(coarse.offsets)
            coarse = replace(coarse, scales=change(coarse.scales), offsets=coarse_offsets)
        return replace(self, codes=codes, scales=scales, offsets=offsets, coarse=coarse)


def _kind(matrix: CodedMatrix) -> tuple[object, ...]:
    blocks = None if matrix.coarse is None else matrix.coarse.groups
    of_inputs = matrix.inputs, matrix.shape[1]
    return matrix.code, matrix.group, matrix.scales.dtype, matrix.offsets is None, blocks, *of_inputs


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
    first, coarse = matrices[0], [matrix.coarse for matrix in matrices if matrix.coarse is not None]
    joined_coarse = None
    if coarse:
        scales, offsets = _below([each.scales for each in coarse]), _below([each.offsets for each in coarse])
        assert scales is not None
        joined_coarse = CoarseScales(scales, offsets, coarse[0].groups)
    return replace(
        first,
        codes=torch.cat([matrix.codes for matrix in matrices]),
        scales=torch.cat([matrix.scales for matrix in matrices]),
        offsets=_below([matrix.offsets for matrix in matrices]),
        coarse=joined_coarse,
    )


def _below(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Puts tensors one below the other; None: there are none."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None
