"""Integers of 4 or 8 bits in words of 32, as checkpoints have them."""

import torch
from torch import Tensor

from services.engine.quantization.codes import Code, CodedMatrix

_WORD_BITS = 32
_BY_TURNS = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word, in fours of bits, of each of AWQ's eight numbers


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Returns the numbers of words, int32[rows, columns], that lie along this dimension from the lowest bits on:
    uint8, with 32 / bits numbers for each word.
    """
    return _spread(words, [place * bits for place in range(_WORD_BITS // bits)], bits, dim)


def unpacked_by_turns(words: Tensor) -> Tensor:
    """Returns the numbers of AWQ's words, int32[rows, columns], that lie along columns: uint8[rows, 8 * columns]."""
    return _spread(words, [place * 4 for place in _BY_TURNS], 4, 1)


def _spread(words: Tensor, shifts: list[int], bits: int, dim: int) -> Tensor:
    mask = (1 << bits) - 1
    return torch.stack([((words >> shift) & mask).to(torch.uint8) for shift in shifts], dim=dim + 1).flatten(
        dim, dim + 1
    )


def as_codes(bits: int, unsigned: Tensor) -> tuple[Code, Tensor]:
    """Returns numbers of 0 to 2 ** bits - 1, uint8[out, in], as codes: of 8 bits those of the numbers less 128."""
    return (Code.UINT4, unsigned) if bits == 4 else (Code.INT8, unsigned ^ 0x80)


def offsets_of(bits: int, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns scales and offsets of codes made by `as_codes`: number = scale * (unsigned - zero).

    scales: [out, groups]; zeros: int32 of this shape, in the unsigned numbers; None: 2 ** (bits - 1).
    """
    if zeros is None:
        return (scales, None) if bits == 8 else _exact(scales, scales.to(torch.float32) * -8)
    wide = scales.to(torch.float32)
    return wide, wide * (zeros - (0 if bits == 4 else 128)).neg()


def _exact(scales: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both in the dtype of the scales, or in float32 if an offset is beyond the range of that."""
    is_wide = bool((offsets.abs() > torch.finfo(scales.dtype).max).any())
    dtype = torch.float32 if is_wide else scales.dtype
    return scales.to(dtype), offsets.to(dtype)


def with_group_of_each(
    code: Code, codes: Tensor, scales: Tensor, offsets: Tensor | None, groups: Tensor, group: int
) -> CodedMatrix | None:
    """Returns the matrix in which input i has scales[:, groups[i]]; None: the groups are not all of `group` inputs, but
    the last.

    groups: int64[in].
    """
    order = groups.argsort(stable=True)
    counts = groups.bincount(minlength=scales.shape[1])
    expected = torch.full_like(counts, group)
    expected[-1] = len(groups) - group * (len(counts) - 1)
    if not torch.equal(counts, expected):
        return None
    return CodedMatrix(code, codes[:, order].contiguous(), scales, offsets, group, order)
