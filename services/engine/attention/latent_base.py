"""The seam between a decoder with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) and paged latents.

A token's KV in a layer is a row [latent, k_rope] that all heads share. It can be read in two forms:

    absorbed   a head's query [q_nope x K part of kv_b, q_rope] meets the rows themselves, and what it finds of the
               latents goes through the V part of kv_b: little to read for a token that decodes
    expanded   kv_b makes K and V of all heads from the rows first: fewer products for a long prompt

Both give the same up to rounding.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from services.engine.attention.base import KernelInputs, PagedQueries
from services.engine.attention.by_layer import Windows

PlanT = TypeVar("PlanT")


class HeadsExpansion(Protocol):
    """kv_b of some heads that are next to each other."""

    @property
    def heads(self) -> range:
        """Returns the heads."""

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Maps latents, [keys, kv_rank], to k_nope, [keys, heads, nope_dim], and v, [keys, heads, value_dim]."""


class LatentProducts(Protocol):
    """The products of one layer with its kv_b, in the forms in which attention needs them."""

    @property
    def expansions(self) -> Sequence[HeadsExpansion]:
        """Returns kv_b in parts, for expanded prompts: all heads of a long prompt take much memory."""

    def absorb(self, q_nope: Tensor) -> Tensor:
        """Maps [T, heads, nope_dim] to [T, heads, kv_rank]: queries over latents."""

    def values(self, found: Tensor) -> Tensor:
        """Maps what queries found of the latents, [T, heads, kv_rank], to [T, heads, value_dim]."""


class LatentAttention(Protocol[PlanT]):
    """One backend over one pool of blocks of latents; `Attention` explains what both have."""

    @property
    def writes_by_kernel(self) -> bool:
        """See `Attention.writes_by_kernel`."""

    @property
    def rotate_and_write(self) -> None:
        """Returns None: K and V have no heads that a kernel could rotate and write."""

    def prepare(self, queries: PagedQueries, windows: Windows = None) -> PlanT:
        """See `Attention.prepare`. There is no window."""

    def narrow(self, plan: PlanT, tokens: Tensor, layer: int) -> PlanT | None:
        """See `Attention.narrow`."""

    def kernel_inputs(self, plan: PlanT) -> KernelInputs | None:
        """See `Attention.kernel_inputs`."""

    def write(self, plan: PlanT, layer: int, kv: Tensor, turn: tuple[Tensor, Tensor], norm: Tensor) -> None:
        """Norms, rotates and stores the new tokens' rows in the pool.

        kv: [T, rope_dim + kv_rank], k_rope first. turn: cosine and signed sine for `Operations.rotate`. norm: the
        weight [kv_rank] of the latents' RMSNorm.
        """

    def attend(self, plan: PlanT, layer: int, q_nope: Tensor, q_rope: Tensor, products: LatentProducts) -> Tensor:
        """Computes causal attention over each row's latents, which `write` has completed for this layer.

        q_nope: [T, heads, nope_dim]; q_rope: rotated, [T, heads, rope_dim]. Returns [T, heads, value_dim], valid until
        the next call.
        """


AnyLatentAttention = LatentAttention[Any]
