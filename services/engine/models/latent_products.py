"""The products of multi-head latent attention with kv_b (DeepSeek-V2, arXiv 2405.04434, section 2.1).

kv_b has, for each head, a K part [nope_dim, kv_rank] and a V part [value_dim, kv_rank]. Expanded, both are multiplied
with latents. Absorbed, the K part is multiplied with queries, from its other side, and the V part with what the queries
found: so the K part is kept in both orders, and the V part by heads and in the expansion.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from services.engine.attention.latent import Latent
from services.engine.models.head_linear import HeadLinear
from services.engine.models.linear import Linear

_MOST_COLUMNS = 2048  # of K and V of the heads that are expanded at a time
_MOST_COLUMNS_OF_A_GPU = 8192  # with fewer heads at a time, a short chunk would leave most of its processors idle

MakeLinear = Callable[[Tensor, Tensor | None], Linear]  # parameters: weight [out, in], bias [out]


@dataclass(frozen=True, slots=True, eq=False)
class SomeHeadsExpansion:
    """`HeadsExpansion` by one linear layer."""

    heads: range
    kv: Linear  # kv_rank -> heads * (nope_dim + value_dim), a head's K before its V
    nope_dim: int

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """See `HeadsExpansion.expand`."""
        both = self.kv(latents).unflatten(1, (len(self.heads), -1))
        return both[..., : self.nope_dim], both[..., self.nope_dim :]


@dataclass(frozen=True, slots=True, eq=False)
class KvProducts:
    """`LatentProducts` of a layer."""

    expansions: tuple[SomeHeadsExpansion, ...]
    queries: HeadLinear  # nope_dim -> kv_rank
    found: HeadLinear  # kv_rank -> value_dim

    @property
    def is_kernels(self) -> bool:
        """Returns True if kernels compute the absorbed form."""
        return self.queries.is_kernel and self.found.is_kernel

    def absorb(self, q_nope: Tensor) -> Tensor:
        """See `LatentProducts.absorb`."""
        return self.queries(q_nope)

    def values(self, found: Tensor) -> Tensor:
        """See `LatentProducts.values`."""
        return self.found(found)


def make_products(
    weight: Tensor,
    num_heads: int,
    latent: Latent,
    *,
    fused: bool,
    make_linear: MakeLinear = Linear,
    most_columns: int | None = None,
) -> KvProducts:
    """Makes the products of kv_b's weight, [heads * (nope_dim + value_dim), kv_rank], which is not kept.

    fused: heads may have a CPU's kernels. most_columns: of K and V of the heads that are expanded at a time; None: as
    many as suit the weight's device.
    """
    by_heads = weight.unflatten(0, (num_heads, -1))
    of_keys, of_values = by_heads.split((latent.nope_dim, latent.value_dim), dim=1)
    columns = most_columns or (_MOST_COLUMNS if weight.device.type == "cpu" else _MOST_COLUMNS_OF_A_GPU)
    at_once = max(1, columns // (latent.nope_dim + latent.value_dim))
    parts = -(-num_heads // at_once)
    borders = [part * num_heads // parts for part in range(parts + 1)]
    expansions = (
        SomeHeadsExpansion(
            range(begin, end), make_linear(by_heads[begin:end].flatten(0, 1).clone(), None), latent.nope_dim
        )
        for begin, end in pairwise(borders)
    )
    return KvProducts(
        expansions=tuple(expansions),
        queries=HeadLinear(of_keys.transpose(1, 2), fused=fused),
        found=HeadLinear(of_values, fused=fused),
    )


def deinterleaved(rope_dim: int) -> Tensor:
    """Returns the order, int64[rope_dim], in which pairs that lie next to each other are halves against each other."""
    return torch.arange(rope_dim).view(-1, 2).t().flatten()
