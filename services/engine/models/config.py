"""The numbers that a decoder's computation depends on."""

import math
from dataclasses import dataclass, replace
from typing import Self

from services.engine.attention.latent import Latent
from services.engine.models.experts_config import (
    Experts,
)
from services.engine.models.model_config import ModelConfig, Shard
from services.engine.models.rope_config import Rope
from services.protocol.model_files.base import ModelError

SCORE = "score.weight"  # the tensor of a head for scores


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """All that the decoder's computation depends on, weights aside."""

    rms_norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    norm_offset: float | None = None  # is added to norms' weights, which are float32; None: weights are as they are
    wide_qk_norm: bool = False
    activation: str = "silu"  # of MLPs
    local_rope: Rope | None = None  # of layers with a window; None: all have `rope`
    layers_without_rope: tuple[int, ...] = ()
    partial_rotary_factor: float = 1.0  # the share of a head's numbers that are rotated, the first ones
    embedding_scale: float | None = None  # factor on embeddings
    rounds_embedding_scale: bool = True  # to the embeddings' dtype, before it multiplies them
    attention_multiplier: float | None = None  # on attention scores; None: 1 / sqrt(head_dim)
    residual_multiplier: float = 1.0  # on what attention and MLP add to a token
    logits_scaling: float = 1.0  # logits are divided by it
    final_softcap: float | None = None  # of logits: softcap * tanh(logit / softcap)
    attention_sinks: bool = False
    experts: Experts | None = None  # None: each layer has one MLP
    score_tokens: tuple[str, ...] = ()  # a score is the second one's logit less the first one's; none: there is a head
    score_token_ids: tuple[int, ...] = ()  # of these, by the tokenizer
    latent: Latent | None = None  # of multi-head latent attention; KV then has one head, as wide as a latent

    @property
    def has_experts(self) -> bool:
        """Returns True if layers have experts, of which each token takes some."""
        return self.experts is not None and len(self.experts.layers) > 0

    def shard(self, rank: int, size: int, layers: range | None = None, *, expert_parallel: bool = False) -> Self:
        """See `ModelConfig.shard`. A norm over all heads is refused: each rank would have to know the others' heads."""
        if self.wide_qk_norm and size > 1:
            raise ModelError(f"{size} ranks cannot share heads that have one norm of Q and K for all of them")
        own = ModelConfig.shard(self, rank, size, layers, expert_parallel=expert_parallel)
        own = replace(own, layers_without_rope=own.stage.own(self.layers_without_rope))
        if self.experts is None:
            return own
        experts = replace(self.experts, layers=own.stage.own(self.experts.layers))
        shard = Shard(rank, size, self, expert_parallel=expert_parallel)
        if expert_parallel:
            return replace(own, experts=experts.divide(size, shard.experts(experts.num_experts), shard.part))
        return replace(own, experts=experts.shard(size, shard.part))

    @property
    def rotary_dim(self) -> int:
        """Returns how many numbers of a head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor) if self.latent is None else self.latent.rope_dim

    @property
    def num_planes(self) -> int:
        """Returns the planes of a layer's KV: K and V, or the latents alone."""
        return 2 if self.latent is None else 1

    @property
    def scale(self) -> float:
        """Returns the factor on attention scores."""
        if self.latent is not None:
            return self.latent.scale
        return 1 / math.sqrt(self.head_dim) if self.attention_multiplier is None else self.attention_multiplier

    def rope_of(self, layer: int) -> Rope | None:
        """Returns the rope of a layer, None if it has none."""
        if layer in self.layers_without_rope:
            return None
        window = self.windows[layer] if self.windows else self.window
        return self.rope if self.local_rope is None or window is None else self.local_rope


def layer_prefix(layer: int) -> str:
    """Returns how the names of a layer's tensors begin."""
    return f"model.layers.{layer}."
