"""The seam between a decoder and the kernels that read and write paged KV.

`prepare` does a step's index work once for all layers. Each layer then writes its new K and V, and attends to all K and
V of its rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from services.engine.attention.by_layer import Windows


@dataclass(frozen=True, slots=True, eq=False)
class PagedQueries:
    """The tokens that a step computes, and the blocks of their KV. R rows, packed one after the other.

    Row r's query tokens are query_starts[r] to query_starts[r + 1], the last ones of its seq_lens[r] tokens. Its KV is
    in the first ceil(seq_lens[r] / block_size) blocks of block_tables[r]; later entries are not read.
    """

    query_starts: np.ndarray  # int32[R + 1]
    seq_lens: np.ndarray  # int32[R]
    block_tables: np.ndarray  # int32[R, B]


def some_rows(queries: PagedQueries, rows: np.ndarray) -> PagedQueries:
    """Returns the queries of some rows alone, int64[N]."""
    starts = np.append(0, np.cumsum(np.diff(queries.query_starts)[rows])).astype(np.int32)
    return PagedQueries(starts, queries.seq_lens[rows], queries.block_tables[rows])


PlanT = TypeVar("PlanT")

KernelInputs = tuple[tuple[int, ...], tuple[Tensor, ...]]  # see `Attention.kernel_inputs`

# Parameters: plan, layer, heads, cos, signed_sin, weight, eps; see `Attention.rotate_and_write`.
RotateAndWrite = Callable[[Any, int, Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor, Tensor]]


class Attention(Protocol[PlanT]):
    """One backend over one pool of KV blocks.

    A token position that was never written may hold anything, NaN included, and does not affect a result.
    """

    @property
    def writes_by_kernel(self) -> bool:
        """Returns True if `write` only runs kernels: see `Operations.by_rows`."""

    def prepare(self, queries: PagedQueries, windows: Windows = None) -> PlanT:
        """Does the step's index work, for all layers.

        In a layer with a window, a token sees itself and window - 1 before it. A block of which no query of the step
        sees anything in any layer is not read, whatever its entry in the table is.
        """

    def narrow(self, plan: PlanT, tokens: Tensor, layer: int) -> PlanT | None:
        """Returns a plan of one layer for some tokens of the plan's step, int64[N]; None: there is none, or it would
        save no time.

        `attend` with it takes q of these tokens alone, [N, heads, head_dim], and ignores k and v: K and V are all in
        the pool.
        """

    def kernel_inputs(self, plan: PlanT) -> KernelInputs | None:
        """Returns the numbers and tensors of the plan on which `write` and `attend` depend, if they only run kernels;
        else None. The step's tokens are not among the numbers.

        `Operations.replay` takes them as part of its key, and as inputs.
        """

    @property
    def rotate_and_write(self) -> RotateAndWrite | None:
        """Returns a function that does both `Operations.rotate` and `write` in one kernel; None: there is no such
        kernel.

        It takes heads, [T, heads + 2 * kv_heads, head_dim], Q first and V last; rotates Q and K, and writes K and V. It
        returns Q, K and V; K may be unrotated.
        """

    def write(self, plan: PlanT, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores the new tokens' K and V, [T, kv_heads, head_dim] each, in the pool."""

    def attend(self, plan: PlanT, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Computes causal attention of q [T, heads, head_dim] over each row's KV, which `write` has completed for this
        layer.

        k and v are those of `write`, so that the step's own keys need not be read back from the pool. Returns the
        output, shaped like q, and the log-sum-exp of the scores, float32[T, heads]; both are valid until the next call.
        """
