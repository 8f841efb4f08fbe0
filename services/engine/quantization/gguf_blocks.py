"""Blocks of GGUF's ways of storing, as codes (ggml's `ggml-common.h` defines them)."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from services.engine.quantization.codes import Code, CodedMatrix
from services.engine.quantization.gguf_super_blocks import q4_k, q5_k, q6_k

_SCALE_BYTES = 2  # float16
_OF_BLOCK = 32  # numbers
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def coded_blocks(kind: GGMLQuantizationType, blocks: np.ndarray) -> CodedMatrix | None:
    """Returns the matrix of some blocks, uint8[out, blocks of a row, bytes of a block]; None: they have no codes."""
    make = _MAKERS.get(kind)
    return None if make is None else make(blocks)


def _q4_0(blocks: np.ndarray) -> CodedMatrix:
    """number = scale * (code - 8)."""
    scales = _halves(blocks, 0)
    # In float16 they might be beyond its range.
    offsets = scales.to(torch.float32) * -8
    is_wide = bool((offsets.abs() > torch.finfo(torch.float16).max).any())
    dtype = torch.float32 if is_wide else torch.float16
    return CodedMatrix(Code.UINT4, _nibbles(blocks[:, :, 2:]), scales.to(dtype), offsets.to(dtype), _OF_BLOCK)


def _q4_1(blocks: np.ndarray) -> CodedMatrix:
    """number = scale * code + offset."""
    codes = _nibbles(blocks[:, :, 2 * _SCALE_BYTES :])
    return CodedMatrix(Code.UINT4, codes, _halves(blocks, 0), _halves(blocks, _SCALE_BYTES), _OF_BLOCK)


def _q8_0(blocks: np.ndarray) -> CodedMatrix:
    """number = scale * code."""
    codes = torch.from_numpy(np.ascontiguousarray(blocks[:, :, _SCALE_BYTES:])).flatten(1)
    return CodedMatrix(Code.INT8, codes, _halves(blocks, 0), None, _OF_BLOCK)


def _q5_0(blocks: np.ndarray) -> CodedMatrix:
    """number = scale * (code - 16)."""
    codes = _fives(blocks[:, :, _SCALE_BYTES:]) - 16
    return CodedMatrix(Code.INT8, codes, _halves(blocks, 0), None, _OF_BLOCK)


def _q5_1(blocks: np.ndarray) -> CodedMatrix:
    """number = scale * code + offset."""
    codes = _fives(blocks[:, :, 2 * _SCALE_BYTES :])
    return CodedMatrix(Code.INT8, codes, _halves(blocks, 0), _halves(blocks, _SCALE_BYTES), _OF_BLOCK)


def _iq4_nl(blocks: np.ndarray) -> CodedMatrix:
    """number = scale * one of sixteen integers."""
    codes = torch.tensor(_IQ4_NL, dtype=torch.int8).view(torch.uint8)[_nibbles(blocks[:, :, _SCALE_BYTES:]).int()]
    return CodedMatrix(Code.INT8, codes, _halves(blocks, 0), None, _OF_BLOCK)


def _fives(packed: np.ndarray) -> Tensor:
    """Returns codes of 5 bits, uint8[out, in]: a block has their fifth bits in 4 bytes, then the others."""
    fifths = np.unpackbits(packed[:, :, :4], axis=2, bitorder="little")
    return _nibbles(packed[:, :, 4:]) | torch.from_numpy(fifths).flatten(1) << 4


def _halves(blocks: np.ndarray, begin: int) -> Tensor:
    """Returns the float16 of each block that begins at this byte, [out, blocks]."""
    stored = np.ascontiguousarray(blocks[:, :, begin : begin + _SCALE_BYTES])
    return torch.from_numpy(stored).view(torch.float16).squeeze(2)


def _nibbles(packed: np.ndarray) -> Tensor:
    """Returns codes, uint8[out, in]: the lower halves of a block's bytes, then their upper halves."""
    codes = np.concatenate((packed & 0xF, packed >> 4), axis=2)
    return torch.from_numpy(codes).flatten(1)


_MAKERS: Mapping[GGMLQuantizationType, Callable[[np.ndarray], CodedMatrix]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: q4_k,
    GGMLQuantizationType.Q5_K: q5_k,
    GGMLQuantizationType.Q6_K: q6_k,
    GGMLQuantizationType.IQ4_NL: _iq4_nl,
}
