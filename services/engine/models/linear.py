"""y = x Wᵀ + b, with the weight in the order that the matrix library reads fastest.

On a CPU with bfloat16 instructions, bfloat16 weights are re-ordered once for oneDNN; elsewhere, and in float32, the
weight stays as it is.
"""

import torch
from torch import Tensor
from torch.nn import functional

MAX_ROWS = 256  # that oneDNN is given at a time: it splits 300 to 1,900 rows badly over two threads (see below)


class Linear:
    """A linear layer for inference. The caller gives up `weight` [out, in] and `bias` [out]."""

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = weight.dtype == torch.bfloat16 and _can_pack()
        self._weight = _pack(weight) if self._packed else weight.contiguous()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        if not self._packed:
            return functional.linear(x, self._weight, self._bias)
        if len(x) <= MAX_ROWS:
            return self._multiply(x)
        return torch.cat([self._multiply(piece) for piece in x.split(MAX_ROWS)])

    def _multiply(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, MAX_ROWS)
    return packed


def _can_pack() -> bool:
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
