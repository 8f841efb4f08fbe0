"""`Operations` in torch alone: the reference, and the fallback if numba is missing or the dtype has no kernels."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.engine.kernels.base import Rows

T = TypeVar("T")


class TorchOperations:
    """`Operations` by torch."""

    def replay(self, key: Hashable, inputs: Sequence[Tensor], body: Callable[[], T]) -> T:
        """See `Operations.replay`."""
        return body()

    def by_rows(self, num_rows: int, row_bytes: int, body: Callable[[], Rows]) -> Rows:
        """See `Operations.by_rows`."""
        return body()

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Operations.norm`. Computes in float32."""
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype) if weight.dtype == x.dtype else (weight * normed).to(x.dtype)

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
        """See `Operations.add_norm`."""
        return self.norm(x.add_(y if factor == 1 else y * factor), weight, eps)

    def add_normed(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> None:
        """See `Operations.add_normed`."""
        x.add_(_normed(y, weight, eps))

    def norm_in_place(self, y: Tensor, weight: Tensor, eps: float) -> None:
        """See `Operations.norm_in_place`."""
        y.copy_(_normed(y, weight, eps))

    def rotate(self, heads: Tensor, cos: Tensor, signed_sin: Tensor, weight: Tensor | None, eps: float) -> None:
        """See `Operations.rotate`."""
        if weight is not None:
            heads.copy_(self.norm(heads, weight, eps))
        turned = heads[..., : cos.shape[-1]]
        swapped = turned.roll(turned.shape[-1] // 2, -1)
        turned.copy_(torch.addcmul(turned * cos, swapped, signed_sin))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Operations.silu_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Operations.gelu_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh").mul_(up)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """See `HostOperations.mask`."""
        by_byte = bits.contiguous().view(torch.uint8).numpy()
        allowed = np.unpackbits(by_byte, axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
        finite = logits[rows].clamp_(min=torch.finfo(logits.dtype).min)
        logits[rows] = finite.masked_fill_(~torch.from_numpy(allowed), -torch.inf)


def _normed(y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMSNorm, computed in float32 and rounded once."""
    wide = y.to(torch.float32)
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).to(y.dtype)
