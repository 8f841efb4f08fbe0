"""The parts of a layer: attention with rotary positions, and MLPs. A family is a list of them.

A decoder runs what lies between two layers' attentions as one piece, some rows after the others. So an attention has
two methods: `begin` up to the product of queries and keys, and `end` after it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.kernels.base import Operations
from services.engine.models.config import DecoderConfig, layer_prefix
from services.engine.models.linear import Linear
from services.engine.models.tensors import Tensors

Turn = tuple[Tensor, Tensor]  # cos and signed sin of the tokens' positions, see `Operations.rotate`

# Rotates Q and K of heads, [T, heads + 2 * kv_heads, head_dim], writes K and V to the pool, and returns q, k and v.
# Parameters: heads, cos, signed_sin, weight, eps; see `Attention.rotate_and_write`.
RotateAndWrite = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor, Tensor]]


class Mlp(Protocol):
    """The part of a layer that knows each token alone."""

    @property
    def is_kernels(self) -> bool:
        """Returns True if kernels compute all products: see `Operations.by_rows`."""

    @property
    def groups_rows(self) -> bool:
        """Returns True if it sorts a step's tokens into groups, so that it takes all of them at once: not by rows."""

    @property
    def width(self) -> int:
        """Returns how many numbers the widest row has that it makes."""

    def forward(self, x: Tensor, operations: Operations) -> Tensor:
        """Maps [T, hidden] to [T, hidden]."""


class AttentionPart(Protocol):
    """The part of a layer in which tokens see others. Its method up to the product of queries and keys, `begin`, is its
    decoder's affair.
    """

    @property
    def is_kernels(self) -> bool:
        """Returns True if kernels compute all products: see `Operations.by_rows`."""

    @property
    def width(self) -> int:
        """Returns how many numbers the widest row has that it makes."""

    def halves(self) -> "tuple[SomeHeads, SomeHeads] | None":
        """Returns Q, and K with V, as parts of their own that share the weights; None: they are computed together."""

    def end(self, attended: Tensor) -> Tensor:
        """Maps what the queries found, [T, heads, width of a head's V], to [T, hidden]."""


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp:
    """`Mlp` with a gate: down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202)."""

    gate_up: Linear  # hidden -> 2 * width, gate first
    down: Linear  # width -> hidden
    width: int
    activation: str = "silu"

    @property
    def is_kernels(self) -> bool:
        """Returns True if kernels compute both products."""
        return self.gate_up.is_kernel and self.down.is_kernel

    @property
    def groups_rows(self) -> bool:
        """Returns False: each token goes the same way."""
        return False

    def forward(self, x: Tensor, operations: Operations) -> Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        if self.activation == "silu":
            return self.down(self.gate_up.gated(x, operations.silu_mul))
        return self.down(operations.gelu_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True, eq=False)
class ReluMlp:
    """`Mlp` of the first transformers: down(ReLU(up(x))) (Vaswani et al. 2017, arXiv 1706.03762)."""

    up: Linear  # hidden -> width
    down: Linear  # width -> hidden
    width: int

    @property
    def is_kernels(self) -> bool:
        """Returns False: no kernel computes the ReLU."""
        return False

    @property
    def groups_rows(self) -> bool:
        """Returns False: each token goes the same way."""
        return False

    def forward(self, x: Tensor, operations: Operations) -> Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        return self.down(functional.relu(self.up(x)))


@dataclass(frozen=True, slots=True, eq=False)
class GroupedAttention:
    """Attention whose query heads share KV heads (Ainslie et al. 2023, arXiv 2305.13245), with rotary positions
    (Su et al. 2021, arXiv 2104.09864), in some families not in all layers, and before these in some an RMSNorm of each
    head, or of all heads of Q, and all of K, together.
    """

    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * head_dim, rows in the order Q, K, V
    output: Linear  # heads * head_dim -> hidden
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: the weight for each head of Q, then of K
    wide_norms: tuple[Tensor, Tensor] | None  # [heads * head_dim], [kv_heads * head_dim]: one for Q, and one for K
    rotates: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    @property
    def is_kernels(self) -> bool:
        """Returns True if kernels compute all products: see `Operations.by_rows`."""
        return self.qkv.is_kernel and self.output.is_kernel

    @property
    def width(self) -> int:
        """Returns how many numbers the heads of Q, K and V of a token have together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def begin(
        self, x: Tensor, turn: Turn, operations: Operations, rotate_and_write: RotateAndWrite
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v of x, [T, hidden]: [T, heads or kv_heads, head_dim]. K and V are written to the pool."""
        projected = self.qkv(x)
        if self.wide_norms is not None:
            q_width, qk_width = self.num_heads * self.head_dim, (self.num_heads + self.num_kv_heads) * self.head_dim
            operations.norm_in_place(projected[:, :q_width], self.wide_norms[0], self.eps)
            operations.norm_in_place(projected[:, q_width:qk_width], self.wide_norms[1], self.eps)
        heads = projected.unflatten(1, (-1, self.head_dim))
        return rotate_and_write(heads, *turn, self.qk_norm, self.eps)

    def end(self, attended: Tensor) -> Tensor:
        """Maps what the queries found, [T, heads, head_dim], to [T, hidden]."""
        return self.output(attended.flatten(1))

    def halves(self) -> "tuple[SomeHeads, SomeHeads] | None":
        """Returns Q, and K with V, as parts of their own that share the weights; None: they are computed together."""
        q_width, norm = self.num_heads * self.head_dim, self.qk_norm
        q, kv = self.qkv.columns(0, q_width), self.qkv.columns(q_width, self.width)
        if q is None or kv is None:
            return None
        norms = (None, None) if norm is None else (norm[: self.num_heads], norm[self.num_heads :])
        wide = self.wide_norms or (None, None)
        return (
            SomeHeads(q, self.num_heads, norms[0], wide[0], self.rotates, self.head_dim, self.eps),
            SomeHeads(kv, self.num_kv_heads, norms[1], wide[1], self.rotates, self.head_dim, self.eps),
        )


@dataclass(frozen=True, slots=True, eq=False)
class SomeHeads:
    """The heads of an attention's Q, or of its K and V, of which the first ones are normed and rotated."""

    heads: Linear  # hidden -> heads * head_dim
    num_rotated: int
    norm: Tensor | None  # [num_rotated, head_dim]
    wide_norm: Tensor | None  # [num_rotated * head_dim], of all of them together
    rotates: bool
    head_dim: int
    eps: float

    def forward(self, x: Tensor, turn: Turn, operations: Operations) -> Tensor:
        """Maps [T, hidden] to [T, heads, head_dim]."""
        projected = self.heads(x)
        if self.wide_norm is not None:
            operations.norm_in_place(projected[:, : self.num_rotated * self.head_dim], self.wide_norm, self.eps)
        heads = projected.unflatten(1, (-1, self.head_dim))
        if self.rotates:
            operations.rotate(heads[:, : self.num_rotated], *turn, self.norm, self.eps)
        return heads


def load_gated_mlp(
    tensors: Tensors, config: DecoderConfig, layer: int, gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
) -> GatedMlp:
    """Reads the MLP of a layer. gate_up: the names of the tensors with gate and up. Raises ModelError."""
    names = f"{layer_prefix(layer)}mlp."
    return GatedMlp(
        gate_up=tensors.linear(*(f"{names}{name}" for name in gate_up), bias=config.mlp_bias),
        down=tensors.linear(f"{names}down_proj", bias=config.mlp_bias),
        width=config.intermediate_size,
        activation=config.activation,
    )


def load_norm(tensors: Tensors, config: DecoderConfig, name: str) -> Tensor:
    """Reads the weight of an RMSNorm, in float32 where the family has an offset. Raises ModelError."""
    weight = tensors.vector(f"{name}.weight")
    return weight if config.norm_offset is None else weight.to(torch.float32) + config.norm_offset


def load_attention(
    tensors: Tensors, config: DecoderConfig, layer: int, qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
) -> GroupedAttention:
    """Reads the attention of a layer. qkv: the names of the tensors with Q, K and V. Raises ModelError."""
    names = f"{layer_prefix(layer)}self_attn."
    return GroupedAttention(
        qkv=tensors.linear(*(f"{names}{name}" for name in qkv), bias=config.qkv_bias),
        output=tensors.linear(f"{names}o_proj", bias=config.output_bias),
        qk_norm=_load_qk_norm(tensors, config, names) if config.qk_norm else None,
        wide_norms=_load_wide_norms(tensors, config, names) if config.wide_qk_norm else None,
        rotates=config.rope_of(layer) is not None,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
    )


def _load_qk_norm(tensors: Tensors, config: DecoderConfig, names: str) -> Tensor:
    q_norm = load_norm(tensors, config, f"{names}q_norm").expand(config.num_heads, -1)
    k_norm = load_norm(tensors, config, f"{names}k_norm").expand(config.num_kv_heads, -1)
    return torch.cat((q_norm, k_norm))


def _load_wide_norms(tensors: Tensors, config: DecoderConfig, names: str) -> tuple[Tensor, Tensor]:
    return load_norm(tensors, config, f"{names}q_norm"), load_norm(tensors, config, f"{names}k_norm")
