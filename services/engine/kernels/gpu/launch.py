"""Properties of the environment that every launch of a Triton kernel depends on."""

from typing import Any

import torch
import triton
import triton.language as tl

_TL_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.int8: tl.int8,
}
_OF_BYTES = (torch.float8_e4m3fn, torch.int8)


class UnsupportedShape(ValueError):
    """A model has sizes for which there are no kernels. The message is one line for a person."""


def is_interpreted() -> bool:
    """Returns True if kernels run in Triton's interpreter, on the CPU. A kernel keeps the answer of its definition."""
    return bool(triton.knobs.runtime.interpret)


def dot_dtype(dtype: torch.dtype) -> Any:
    """Returns the dtype of `tl.dot`'s operands for inputs of this dtype.

    The interpreter multiplies the bits of bfloat16 operands, so it gets float32 for all dtypes but those of one byte.
    """
    return tl.float32 if is_interpreted() and dtype not in _OF_BYTES else _TL_DTYPES[dtype]
