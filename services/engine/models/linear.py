"""y = x Wᵀ + b, with the weight in the order that the matrix library reads fastest.

On a CPU with bfloat16 instructions, bfloat16 weights are re-ordered once for oneDNN; elsewhere, and in float32, the
weight stays as it is.
"""

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """A linear layer for inference. The caller gives up `weight` [out, in] and `bias` [out]."""

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = weight.dtype == torch.bfloat16 and _can_pack()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight.contiguous()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return functional.linear(x, self._weight, self._bias)


def _can_pack() -> bool:
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
