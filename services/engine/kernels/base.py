"""The small operations between a decoder's matrix products: one interface, for torch and for fused kernels."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Rows = TypeVar("Rows", bound=Tensor | tuple[Tensor, ...])


class BlockSizes(NamedTuple):
    """Numbers that the blocks of rows of `Operations.by_rows` depend on, where several processes cut the same ones."""

    threads: int  # for so many threads, however many run
    row_bytes: int  # for rows of so many bytes, whatever a call says


class Operations(Protocol):
    """Tensors are of one dtype. The elements of a row are contiguous. Rows may lie apart."""

    def replay(self, key: Hashable, inputs: Sequence[Tensor], body: Callable[[], T]) -> T:
        """Runs `body`, which only runs kernels, and returns its result.

        The kernels may run when `body` ends; or those of an earlier call with this key run again on these inputs, and
        `body` is not called. `body` has no other inputs than `inputs`. The result is valid until the next call.
        """

    def by_rows(self, num_rows: int, row_bytes: int, body: Callable[[], Rows]) -> Rows:
        """Runs `body`, which only runs kernels, and returns its result.

        The kernels may run for some rows first and for others later: each row of the results depends only on the same
        row of the tensors that the kernels read.

        row_bytes: bytes that the kernel with the widest rows reads and writes for each row.
        """

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the RMSNorm of [T, width] over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467).

        The normed row is rounded before it is multiplied by a weight of x's dtype, and after it is multiplied by one in
        float32. The rows of x may lie apart.
        """

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
        """Adds y, times the factor, to x, in place, and returns the RMSNorm of the sum, as `norm` does."""

    def add_normed(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> None:
        """Adds the RMSNorm of y to x, in place. The norm is rounded once, with its float32 weight."""

    def norm_in_place(self, y: Tensor, weight: Tensor, eps: float) -> None:
        """Overwrites y, [T, width], with its RMSNorm, which is rounded once, with its float32 weight."""

    def rotate(self, heads: Tensor, cos: Tensor, signed_sin: Tensor, weight: Tensor | None, eps: float) -> None:
        """Rotates heads [T, n, head_dim] in place, after an RMSNorm of each head if there is a weight [n, head_dim],
        as in `norm`.

        cos and signed_sin: [T, 1, rotary_dim], of the first numbers of a head; the others stay. (a, b) becomes (a cos -
        b sin, b cos + a sin), halves of these numbers against each other.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns SiLU(gate) * up, [T, 2 * width] -> [T, width] (Shazeer 2020, arXiv 2002.05202)."""

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns GELU(gate) * up, [T, 2 * width] -> [T, width], by tanh (Hendrycks and Gimpel 2016, arXiv
        1606.08415).
        """


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """The way from products of queries and keys to weights: the softmax of scores, product * scale."""

    scale: float
    softcap: float | None = None  # a score becomes softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118)
    # float32[layers, heads], contiguous: one more score of each query, of a key without a value ("attention sinks" of
    # gpt-oss, arXiv 2508.10925). The log-sum-exp covers it.
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CodedKv:
    """Facts about a pool of codes of one byte that the pool itself does not hold."""

    dtype: torch.dtype  # of q, of new K and V, and of the output
    scales: Tensor | None = (
        None  # float32[layers, 2, kv_heads], static ones of K before V; None: each token has its own
    )


class HostOperations(Operations, Protocol):
    """`Operations` on the CPU, where sampling is, too."""

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Sets logits [N, vocab] of tokens whose bit is 0 to -inf, in place. They may be float32 or the kernels' dtype.

        rows: int64[M], those that have bits; bits: int32[M, ceil(vocab / 32)], lowest bit first. Of a word with zeros,
        the other tokens' logits are finite afterwards.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Singles:
    """R rows of the batch with one query token each. Tensors are int32 and contiguous."""

    tokens: Tensor  # [R], indices of the step's tokens
    tables: Tensor  # [R, B], block tables
    first_keys: Tensor  # [R]; earlier keys are not read
    seq_lens: Tensor  # [R]
    begun: bool  # if the first key is not 0, the output already holds the attention over the keys before it


class Paged(Protocol):
    """Kernels over a pool of KV blocks."""

    def store(self, layer: int, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Copies k and v, [T, kv_heads, head_dim] with equal strides, into the pool.

        offsets: int64[T]; each token's K in head 0 of layer 0 begins at this element of the pool.
        """

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor, singles: Singles) -> None:
        """Computes the attention of some tokens of q [T, heads, head_dim].

        Writes to out, contiguous and shaped like q, and to lse, float32[T, heads].
        """


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """M query tokens in N tiles; a tile has one block table. Tensors are int32."""

    tokens: Tensor  # [M], indices of the step's tokens
    limits: Tensor  # [M], how many of the table's keys each token sees
    starts: Tensor  # [N + 1], index in `tokens` at which each tile begins
    rows: Tensor  # [N], each tile's row of the block tables
    first_keys: Tensor  # [N], multiples of the block size; earlier keys are not read
    window: int  # a token sees at most so many keys before its limit; 0: all
    begun: bool  # if the first key is not 0, the output already holds the attention over the keys before it


class PagedTiles(Protocol):
    """A kernel for many query tokens over a pool of KV blocks."""

    max_tokens: int  # of one tile

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor, tiles: Tiles, tables: Tensor) -> None:
        """Computes attention like `Paged.attend`. tables: int32[R, B], the block tables."""


class LatentPaged(Protocol):
    """Kernels over a pool of latents, whose rows are [latent, k_rope] (see `LatentAttention`)."""

    max_tokens: int  # of one tile

    def store(
        self, layer: int, offsets: Tensor, kv: Tensor, turn: tuple[Tensor, Tensor], norm: Tensor, eps: float
    ) -> None:
        """Norms, rotates and writes rows, see `LatentAttention.write`.

        offsets: int64[T]; each token's row in layer 0 begins at this element of the pool.
        """

    def attend(
        self,
        layer: int,
        queries: tuple[Tensor, Tensor],
        outputs: tuple[Tensor, Tensor],
        passes: Sequence[Tiles],
        tables: Tensor,
    ) -> None:
        """Computes the attention of all tokens, in tiles without a window, one pass after the other.

        queries: [T, heads, kv_rank], absorbed, and rotated [T, heads, rope_dim]; numbers of a token's heads lie next to
        each other. outputs, contiguous: what the queries find of the latents, [T, heads, kv_rank], and the
        log-sum-exp of the scores, float32[T, heads]. tables: int32[R, B].
        """
