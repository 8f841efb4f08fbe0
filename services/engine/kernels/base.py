"""The small operations between a decoder's matrix products: one interface, for torch and for fused kernels."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")
Rows = TypeVar("Rows", bound=Tensor | tuple[Tensor, ...])


class Operations(Protocol):
    """Tensors are of one dtype. Elements of a row are next to each other; rows may lie apart, but not those of x."""

    def replay(self, key: Hashable, inputs: Sequence[Tensor], body: Callable[[], T]) -> T:
        """What `body` returns, which only runs kernels. They may run when it ends, or as they did in an earlier call
        with this key, but on these inputs; they have no others. The result holds until the next call.
        """

    def by_rows(self, num_rows: int, row_bytes: int, body: Callable[[], Rows]) -> Rows:
        """What `body` returns, which only runs kernels. It may run them for some rows after the others: each row of the
        results depends on the same row of what they are made from.

        row_bytes: that the kernel with the widest rows reads and writes of each.
        """

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of [T, width] over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds y to x, in place, and returns the RMSNorm of that."""

    def rotate(self, heads: Tensor, cos: Tensor, signed_sin: Tensor, weight: Tensor | None, eps: float) -> None:
        """Rotates heads [T, n, head_dim] in place, after an RMSNorm of each where there is a weight [n, head_dim].

        cos and signed_sin: [T, 1, head_dim]; (a, b) becomes (a cos - b sin, b cos + a sin), halves against each other.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """SiLU(gate) * up, [T, 2 * width] -> [T, width] (Shazeer 2020, arXiv 2002.05202)."""


@dataclass(frozen=True, slots=True, eq=False)
class Singles:
    """R rows with one query token. int32 each, contiguous."""

    tokens: Tensor  # [R], which of the step's tokens
    tables: Tensor  # [R, B], of blocks
    first_keys: Tensor  # [R]: earlier ones are not looked at
    seq_lens: Tensor  # [R]
    begun: bool  # where the first key is not 0, the output already holds the attention over those before it


class Paged(Protocol):
    """Kernels over a pool of KV blocks."""

    def store(self, layer: int, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v, [T, kv_heads, head_dim] with equal strides, go to `offsets`: int64[T], elements of the pool, of
        each token's K in head 0 of layer 0.
        """

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor, singles: Singles) -> None:
        """Attention of some tokens of q [T, heads, head_dim]: into out, the same but contiguous, and lse, float32[T,
        heads].
        """


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """M query tokens in N tiles, each of which has one block table. int32 each."""

    tokens: Tensor  # [M], which of the step's tokens
    limits: Tensor  # [M], how many of the table's keys each sees
    starts: Tensor  # [N + 1], where a tile begins in `tokens`
    rows: Tensor  # [N], of the block tables
    first_keys: Tensor  # [N], multiples of the block size: earlier ones are not looked at
    window: int  # how many of the table's keys up to its limit a token sees at most; 0: all
    begun: bool  # where the first key is not 0, the output already holds the attention over those before it


class PagedTiles(Protocol):
    """A kernel for many query tokens over a pool of KV blocks."""

    max_tokens: int  # of a tile

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor, tiles: Tiles, tables: Tensor) -> None:
        """As `Paged.attend`. tables: int32[R, B]."""
