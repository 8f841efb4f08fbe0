"""The seam between a decoder and the kernels that read and write paged KV.

A step's index work is done once, in `prepare`; each layer then writes its new K and V and attends over all of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PagedQueries:
    """Which tokens a step computes, and where their KV lies. R rows, packed one after the other.

    Row r's query tokens are query_starts[r] to query_starts[r + 1], the last ones of its seq_lens[r] tokens; its KV
    lies in the first ceil(seq_lens[r] / block_size) blocks of block_tables[r]. Later entries are not looked at.
    """

    query_starts: np.ndarray  # int32[R + 1]
    seq_lens: np.ndarray  # int32[R]
    block_tables: np.ndarray  # int32[R, B]


PlanT = TypeVar("PlanT")

# Of plan, layer, heads, cos, signed_sin, weight, eps; see `Attention.rotate_and_write`.
RotateAndWrite = Callable[[Any, int, Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor, Tensor]]


class Attention(Protocol[PlanT]):
    """One backend over one pool of KV blocks.

    A slot that was never written may hold anything, NaN included. `prepare` clears a block when its first position is
    about to be written, so a sequence's block never holds what another one left there.
    """

    @property
    def writes_by_kernel(self) -> bool:
        """Whether `write` only runs kernels: see `Operations.by_rows`."""

    def prepare(self, queries: PagedQueries, window: int | None = None) -> PlanT:
        """The step's index work, for all layers.

        With a `window`, a token sees itself and window - 1 before it. Blocks of which no query of the step sees
        anything are not read, whatever the table says of them.
        """

    def kernel_inputs(self, plan: PlanT) -> tuple[tuple[int, ...], tuple[Tensor, ...]] | None:
        """Where `write` and `attend` only run kernels: which numbers (the step's tokens aside) and which
        tensors of the plan these depend on.

        See `Operations.replay`.
        """

    @property
    def rotate_and_write(self) -> RotateAndWrite | None:
        """Where one kernel does both: what `Operations.rotate` does to Q and K in heads, [T, heads + 2 * kv_heads,
        head_dim] with Q first and V last, and `write` with K and V. Returns Q, K and V; K may be as it was.
        """

    def write(self, plan: PlanT, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores the new tokens' K and V, [T, kv_heads, head_dim] each, in the pool."""

    def attend(self, plan: PlanT, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Causal attention of q [T, heads, head_dim] over each row's KV, which `write` has completed for this layer.

        k and v are what `write` was given: the step's own keys need not be read back from the pool.
        Returns the output, shaped like q, and the log-sum-exp of the scores, float32[T, heads]. They hold until the
        next call.
        """
