"""`Operations` on CUDA, each by a Triton kernel."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from services.engine.kernels.base import Rows
from services.engine.kernels.gpu import rotary, rows

T = TypeVar("T")


class TritonOperations:
    """`Operations` by Triton kernels. Results are new tensors; in a CUDA graph, tensors of its memory pool."""

    def replay(self, key: Hashable, inputs: Sequence[Tensor], body: Callable[[], T]) -> T:
        """See `Operations.replay`. Calls `body` each time: the runner replays whole steps as CUDA graphs."""
        return body()

    def by_rows(self, num_rows: int, row_bytes: int, body: Callable[[], Rows]) -> Rows:
        """See `Operations.by_rows`."""
        return body()

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Operations.norm`."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows.norm_into(x, None, weight, eps, out)
        return out

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
        """See `Operations.add_norm`."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows.norm_into(x, y, weight, eps, out, factor)
        return out

    def add_normed(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> None:
        """See `Operations.add_normed`."""
        rows.add_normed(x, y, weight, eps)

    def norm_in_place(self, y: Tensor, weight: Tensor, eps: float) -> None:
        """See `Operations.norm_in_place`."""
        rows.add_normed(None, y, weight, eps)

    def rotate(self, heads: Tensor, cos: Tensor, signed_sin: Tensor, weight: Tensor | None, eps: float) -> None:
        """See `Operations.rotate`."""
        rotary.rotate(heads, cos, signed_sin, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Operations.silu_mul`."""
        return self._gated(gate_up, gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Operations.gelu_mul`."""
        return self._gated(gate_up, gelu=True)

    def _gated(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        out = torch.empty((len(gate_up), gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
        rows.gated_into(gate_up, out, gelu=gelu)
        return out
