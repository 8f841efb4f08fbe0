"""What every launch of a Triton kernel asks of its surroundings."""

from typing import Any

import torch
import triton
import triton.language as tl

_TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class UnsupportedShape(ValueError):
    """A model has sizes that there are no kernels for: one line for a person."""


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU. Fixed when a kernel is defined."""
    return bool(triton.knobs.runtime.interpret)


def dot_dtype(dtype: torch.dtype) -> Any:
    """What operands of `tl.dot` are cast to, for inputs of this dtype.

    The interpreter multiplies the bits of bfloat16 operands, so there it is always float32.
    """
    return tl.float32 if is_interpreted() else _TL_DTYPES[dtype]
