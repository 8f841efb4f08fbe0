"""Linear layers by kernels, with a weight of numbers."""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from services.engine.kernels.cpu import matmul
from services.engine.kernels.cpu.amx import matmul as amx_matmul
from services.engine.kernels.cpu.intrinsics import ISA
from services.engine.kernels.cpu.matmul import pack, padded
from services.engine.kernels.cpu.panel_linear import PanelLinear, ProductKernels
from services.engine.kernels.cpu.register_tiles import COLUMNS

_DTYPES = (torch.bfloat16, torch.float32)


class PackedLinear(PanelLinear):
    """A linear layer, x W^T + b, that computes in the weight's dtype."""

    __slots__ = ()

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [columns, depth], accepted by `can_pack`."""
        assert can_pack(weight)
        self._columns, self._length = weight.shape
        self._kernels = _kernels(str(weight.dtype).removeprefix("torch."), _fits_amx(weight))
        self._weight = pack(weight)
        self._numbers = None if bias is None else padded_bias(bias).view(-1, COLUMNS)

    def _read(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        return x, (x.data_ptr(), x.stride(0))


def padded_bias(bias: Tensor) -> Tensor:
    """Returns a bias in float32, with zeros for the columns that fill the last panel."""
    whole = torch.zeros(padded(len(bias)), dtype=torch.float32)
    whole[: len(bias)] = bias
    return whole


def can_pack(weight: Tensor) -> bool:
    """Returns True if there is a kernel for this weight."""
    return weight.dtype in _DTYPES and (weight.dtype == torch.float32 or weight.shape[1] % 2 == 0)


@cache
def _kernels(dtype: str, by_amx: bool) -> ProductKernels:
    kind: Any = amx_matmul if by_amx else matmul
    return ProductKernels(kind, partial(kind.make_matmul, dtype), partial(_kernels, dtype, by_amx))


def _fits_amx(weight: Tensor) -> bool:
    columns, depth = weight.shape
    whole = columns % (2 * COLUMNS) == 0 and depth % amx_matmul.BLOCK == 0
    return ISA.has_amx and weight.dtype == torch.bfloat16 and whole
