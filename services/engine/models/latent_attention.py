"""Multi-head latent attention as a part of a layer; `latent_config.py` shows its products.

Where the pairs of a checkpoint's rotary numbers lie next to each other, the rows of the weights that make them are put
in halves: scores are sums over all of them, in any order that Q and K share.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.attention.latent import LATENT_NORM_EPS, Latent
from services.engine.kernels.base import Operations
from services.engine.models.config import DecoderConfig, layer_prefix
from services.engine.models.latent_products import KvProducts, deinterleaved, make_products
from services.engine.models.linear import Linear
from services.engine.models.parts import Turn
from services.engine.models.tensors import Tensors

# Norms, rotates and writes KV, [T, rope_dim + kv_rank]. Parameters: kv, turn, norm; see `LatentAttention.write`.
Write = Callable[[Tensor, Turn, Tensor], None]


@dataclass(frozen=True, slots=True, eq=False)
class LowRankQueries:
    """The products that make Q from a narrow vector."""

    norm: Tensor  # [q_rank]
    up: Linear  # q_rank -> heads * nope_dim + heads * rope_dim


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttentionPart:
    """Attention over latents that all heads share."""

    down: Linear  # hidden -> Q, or the narrow vector that Q is made from; then rope_dim and kv_rank of KV
    queries: LowRankQueries | None  # None: `down` makes Q itself: heads * nope_dim + heads * rope_dim
    kv_norm: Tensor  # [kv_rank]
    products: KvProducts
    output: Linear  # heads * value_dim -> hidden
    num_heads: int
    latent: Latent

    @property
    def is_kernels(self) -> bool:
        """Returns True if kernels compute all products of the absorbed form: see `Operations.by_rows`."""
        products = (self.down.is_kernel, self.output.is_kernel, self.products.is_kernels)
        return all(products) and (self.queries is None or self.queries.up.is_kernel)

    @property
    def width(self) -> int:
        """Returns how many numbers Q and KV of a token have together."""
        return self.num_heads * self.latent.query_dim + self.latent.width

    def halves(self) -> None:
        """Returns None: the last layer's Q is computed with its KV."""

    def begin(self, x: Tensor, turn: Turn, operations: Operations, write: Write) -> tuple[Tensor, Tensor]:
        """Returns q_nope and q_rope of x, [T, hidden]: [T, heads, nope_dim or rope_dim]. KV is written to the pool."""
        latent = self.latent
        first = self.down(x)
        q, kv = first.split((first.shape[1] - latent.width, latent.width), dim=1)
        if self.queries is not None:
            q = self.queries.up(operations.norm(q, self.queries.norm, LATENT_NORM_EPS))
        write(kv, turn, self.kv_norm)
        q_nope, q_rope = (
            part.unflatten(1, (self.num_heads, -1))
            for part in q.split((self.num_heads * latent.nope_dim, self.num_heads * latent.rope_dim), dim=1)
        )
        operations.rotate(q_rope, *turn, None, LATENT_NORM_EPS)
        return q_nope, q_rope

    def end(self, attended: Tensor) -> Tensor:
        """Maps what the queries found, [T, heads, value_dim], to [T, hidden]."""
        return self.output(attended.flatten(1))


def load_latent_attention(tensors: Tensors, config: DecoderConfig, layer: int) -> LatentAttentionPart:
    """Reads the latent attention of a layer. Raises ModelError."""
    names, latent = f"{layer_prefix(layer)}self_attn.", config.latent
    assert latent is not None
    order = deinterleaved(latent.rope_dim) if latent.is_interleaved else torch.arange(latent.rope_dim)
    q, q_bias, queries = _load_queries(tensors, config, names, order)
    kv, kv_bias = _read(tensors, f"{names}kv_a_proj_with_mqa", bias=config.qkv_bias)
    rows = torch.cat((latent.kv_rank + order, torch.arange(latent.kv_rank))).to(kv.device)
    bias = None if kv_bias is None else torch.cat((kv.new_zeros(len(q)) if q_bias is None else q_bias, kv_bias[rows]))
    return LatentAttentionPart(
        down=tensors.product(torch.cat((q, kv[rows])), bias),
        queries=queries,
        kv_norm=tensors.vector(f"{names}kv_a_layernorm.weight"),
        products=make_products(
            tensors.vector(f"{names}kv_b_proj.weight"),
            config.num_heads,
            latent,
            fused=tensors.is_fused,
            make_linear=tensors.product,
        ),
        output=tensors.linear(f"{names}o_proj", bias=config.output_bias),
        num_heads=config.num_heads,
        latent=latent,
    )


def _load_queries(
    tensors: Tensors, config: DecoderConfig, names: str, order: Tensor
) -> tuple[Tensor, Tensor | None, LowRankQueries | None]:
    """Returns the rows that the first product has for Q, their bias, and what makes Q after it."""
    latent = config.latent
    assert latent is not None
    if latent.q_rank is None:
        return _queries_apart(tensors.vector(f"{names}q_proj.weight"), latent, order), None, None
    up = _queries_apart(tensors.vector(f"{names}q_b_proj.weight"), latent, order)
    queries = LowRankQueries(tensors.vector(f"{names}q_a_layernorm.weight"), tensors.product(up, None))
    return *_read(tensors, f"{names}q_a_proj", bias=config.qkv_bias), queries


def _queries_apart(weight: Tensor, latent: Latent, order: Tensor) -> Tensor:
    """Puts the rows of all heads' q_nope before those of all heads' q_rope."""
    by_heads = weight.unflatten(0, (-1, latent.query_dim))
    nope, rope = by_heads.split((latent.nope_dim, latent.rope_dim), dim=1)
    return torch.cat((nope.flatten(0, 1), rope[:, order.to(rope.device)].flatten(0, 1)))


def _read(tensors: Tensors, name: str, *, bias: bool) -> tuple[Tensor, Tensor | None]:
    return tensors.vector(f"{name}.weight"), tensors.vector(f"{name}.bias") if bias else None
