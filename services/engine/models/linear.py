"""y = x Wᵀ + b, with the weight in the order that the matrix library reads fastest.

On a CPU with bfloat16 instructions, bfloat16 weights are re-ordered once for oneDNN; elsewhere, and in float32, the
weight stays as it is. Where there are fused kernels, products are theirs, with the weight as oneDNN has it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from services.engine.kernels.packed_linear import PackedLinear

# oneDNN 3.12 splits some 300 to 1,200 rows badly over two threads. The linear layers of an 82M Llama, ms on a Xeon with
# AMX: 256 rows 16, 512 44, 1,024 93 (in pieces of 256: 68), 2,048 117 (136).
_PIECE, _MANY = 256, 1280


class Linear:
    """A linear layer for inference. The caller gives up `weight` [out, in] and `bias` [out]."""

    __slots__ = ("_bias", "_kernel", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, fused: bool = False) -> None:
        self._packed = weight.dtype == torch.bfloat16 and _can_pack()
        self._weight = _pack(weight) if self._packed else weight.contiguous()
        self._bias = bias
        self._kernel = _make_kernel(weight, self._weight, bias) if self._packed and fused else None

    @property
    def is_kernel(self) -> bool:
        """True where a kernel of ours multiplies."""
        return self._kernel is not None

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        if self._kernel is not None:
            return self._kernel(x)
        if not self._packed:
            return functional.linear(x, self._weight, self._bias)
        pieces = _in_pieces(x)
        return self._multiply(x) if len(pieces) == 1 else torch.cat([self._multiply(piece) for piece in pieces])

    def gated(self, x: Tensor, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """SiLU of the first half of y times the second, [rows, in] -> [rows, out / 2]."""
        return silu_mul(self(x)) if self._kernel is None else self._kernel(x, gated=True)

    def _multiply(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


def _in_pieces(x: Tensor) -> tuple[Tensor, ...]:
    """[T, width] in pieces of so many rows as oneDNN is fastest with, one after the other."""
    return (x,) if len(x) >= _MANY else x.split(_PIECE)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PIECE)
    return packed


def _can_pack() -> bool:
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _make_kernel(weight: Tensor, packed: Tensor, bias: Tensor | None) -> "PackedLinear | None":
    from services.engine.kernels.packed_linear import packed_linear

    return packed_linear(weight, packed, bias)
