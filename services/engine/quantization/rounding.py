"""Matrices of numbers made into codes: 8 bits with a scale for each row, or 4 bits in groups with an offset."""

import torch
from torch import Tensor

from services.engine.quantization.codes import Code, CodedMatrix, Inputs

GROUP = 32  # numbers of 4 bits with one scale and offset
_NUMBERS_AT_ONCE = 1 << 20  # rounded at once; so few stay in the processor's caches


def to_int8(matrix: Tensor) -> CodedMatrix:
    """Returns codes of -127 to 127 with a float32 scale for each row of a matrix [out, in]; what it is multiplied with
    is rounded likewise.
    """
    codes = torch.empty(matrix.shape, dtype=torch.uint8, device=matrix.device)
    scales = torch.empty((len(matrix), 1), device=matrix.device)
    for rows in _pieces(matrix):
        numbers = matrix[rows].to(torch.float32)
        largest = numbers.abs().amax(dim=1, keepdim=True)
        scales[rows] = scale = torch.where(largest == 0, 1.0, largest / 127)
        codes[rows] = (numbers / scale).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    return CodedMatrix(Code.INT8, codes, scales, None, matrix.shape[1], inputs=Inputs.INT8)


def to_int4(matrix: Tensor) -> CodedMatrix:
    """Returns codes of 0 to 15 with a scale and an offset for each 32 numbers of a row of a matrix [out, in].

    With an offset the root mean square of errors of normal numbers is 0.078 of theirs; with codes around 0 it is 0.086,
    and 0.092 against 0.107 for Laplace's. That is worth half a bit.
    """
    out, depth = matrix.shape
    groups = -(-depth // GROUP)
    codes = torch.empty((out, depth), dtype=torch.uint8, device=matrix.device)
    scales, offsets = (torch.empty((out, groups), device=matrix.device) for _ in range(2))
    for rows in _pieces(matrix):
        numbers = matrix[rows].to(torch.float32)
        # What is missing in the last group is the row's last number, which changes neither end of the group.
        missing = numbers[:, -1:].expand(-1, groups * GROUP - depth)
        padded = torch.cat((numbers, missing), dim=1).unflatten(1, (-1, GROUP))
        low, high = padded.amin(dim=2), padded.amax(dim=2)
        # Codes are made with what is stored, which float16 has, where it has room for them.
        low, scale = _rounded(low), _rounded((high - _rounded(low)) / 15)
        scale = torch.where(scale == 0, 1.0, scale)
        steps = ((padded - low[:, :, None]) / scale[:, :, None]).round().clamp(0, 15)
        codes[rows] = steps.to(torch.uint8).flatten(1)[:, :depth]
        scales[rows], offsets[rows] = scale, low
    if bool((torch.maximum(scales, offsets.abs()) <= torch.finfo(torch.float16).max).all()):
        scales, offsets = scales.to(torch.float16), offsets.to(torch.float16)
    return CodedMatrix(Code.UINT4, codes, scales, offsets, GROUP)


def _rounded(numbers: Tensor) -> Tensor:
    """Returns float32 numbers that float16 has, but for those beyond its range."""
    half = numbers.to(torch.float16).to(torch.float32)
    return torch.where(half.isfinite(), half, numbers)


def _pieces(matrix: Tensor) -> list[slice]:
    step = max(1, _NUMBERS_AT_ONCE // max(1, matrix.shape[1]))
    return [slice(first, first + step) for first in range(0, len(matrix), step)]
