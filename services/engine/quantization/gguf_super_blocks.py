"""GGUF's blocks of 256 numbers with scales of two levels, as codes: Q4_K, Q5_K and Q6_K (ggml's `ggml-common.h`).

A float16 for 256 numbers times an integer of 6 or 8 bits for 32 or 16 of them is the scale of these.
"""

import numpy as np
import torch
from torch import Tensor

from services.engine.quantization.codes import CoarseScales, Code, CodedMatrix

_SCALE_BYTES = 12  # of eight scales and eight offsets, 6 bits each


def q4_k(blocks: np.ndarray) -> CodedMatrix:
    """number = scale * code - offset, for 32 numbers."""
    return _with_offsets(Code.UINT4, _codes(_fours(blocks[:, :, 4 + _SCALE_BYTES :])), blocks)


def q5_k(blocks: np.ndarray) -> CodedMatrix:
    """number = scale * code - offset, for 32 numbers; the fifth bits of codes lie apart."""
    fifths, rest = np.split(blocks[:, :, 4 + _SCALE_BYTES :], [32], axis=2)
    high = (fifths[:, :, None] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _with_offsets(Code.UINT5, _codes(_fours(rest) | high << 4), blocks)


def q6_k(blocks: np.ndarray) -> CodedMatrix:
    """number = scale * (code - 32), for 16 numbers; the upper two bits of codes lie apart."""
    low, high, fine, coarse = np.split(blocks, [128, 192, 208], axis=2)
    # Two halves of 128 numbers: their lower bits lie in 64 bytes by fours, their upper ones in 32 bytes by twos.
    lower = low.reshape(*low.shape[:2], 2, 1, 64) >> np.array([0, 4], dtype=np.uint8)[:, None]
    upper = high.reshape(*high.shape[:2], 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    codes = (lower & 0xF).reshape(upper.shape) | (upper & 3) << 4
    scales, of_blocks = _of_rows(np.ascontiguousarray(fine).view(np.int8)), CoarseScales(_halves(coarse), None, 16)
    return CodedMatrix(Code.INT6, _codes(codes), scales, None, 16, coarse=of_blocks)


def _with_offsets(code: Code, codes: Tensor, blocks: np.ndarray) -> CodedMatrix:
    """Returns a matrix with the scales and offsets of Q4_K's and Q5_K's blocks. A block's float16 of offsets is stored
    without its sign.
    """
    packed = blocks[:, :, 4 : 4 + _SCALE_BYTES].reshape(*blocks.shape[:2], 3, 4)
    scales, offsets, both = packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]
    fine = np.concatenate((scales & 0x3F, (both & 0xF) | ((scales >> 2) & 0x30)), axis=2)
    low = np.concatenate((offsets & 0x3F, (both >> 4) | ((offsets >> 2) & 0x30)), axis=2)
    coarse = CoarseScales(_halves(blocks[:, :, :2]), -_halves(blocks[:, :, 2:4]), 8)
    return CodedMatrix(code, codes, _of_rows(fine), _of_rows(low), 32, coarse=coarse)


def _fours(packed: np.ndarray) -> np.ndarray:
    """Returns the numbers of 4 bits of 128 bytes, [..., 8, 32]: of each 32 bytes the lower halves, then the upper."""
    pairs = packed.reshape(*packed.shape[:2], 4, 1, 32) >> np.array([0, 4], dtype=np.uint8)[:, None]
    return (pairs & 0xF).reshape(*packed.shape[:2], 8, 32)


def _halves(stored: np.ndarray) -> Tensor:
    """Returns one float16 of each block, [out, blocks]."""
    return torch.from_numpy(np.ascontiguousarray(stored).view(np.float16)[:, :, 0])


def _codes(codes: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes).reshape(len(codes), -1))


def _of_rows(scales: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(scales).reshape(len(scales), -1))
