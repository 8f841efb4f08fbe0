"""A product for each head with a weight of its own: y[t, h] = x[t, h] W[h]ᵀ."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from services.engine.kernels.cpu.head_products import HeadProducts


class HeadLinear:
    """Linear layers of heads, without biases."""

    __slots__ = ("_kernel", "_weight")

    def __init__(self, weight: Tensor, *, fused: bool) -> None:
        """weight: [heads, out, in], copied. fused: use a kernel for CPUs if there is one."""
        self._kernel = _make_kernel(weight) if fused and weight.device.type == "cpu" else None
        self._weight = None if self._kernel is not None else weight.transpose(1, 2).contiguous()  # [heads, in, out]

    @property
    def is_kernel(self) -> bool:
        """Returns True if one of our kernels multiplies, on the CPU."""
        return self._kernel is not None

    def __call__(self, x: Tensor) -> Tensor:
        """Maps [T, heads, in] to [T, heads, out]."""
        if self._kernel is not None:
            return self._kernel(x)
        assert self._weight is not None
        return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)


def _make_kernel(weight: Tensor) -> "HeadProducts | None":
    from services.engine.kernels.cpu.head_products import HeadProducts, can_pack

    return HeadProducts(weight) if can_pack(weight) else None
