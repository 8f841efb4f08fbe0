"""The tensors of the parts of a decoder's layer: their shapes in a checkpoint, and a rank's shares of them."""

from collections.abc import Callable
from dataclasses import dataclass

from services.engine.models.config import DecoderConfig
from services.engine.models.expert_tensors import (
    ExpertNames,
    expert_shapes,
    expert_shares,
)
from services.engine.models.fused_tensors import (
    fused_attention_shapes,
    fused_attention_shares,
    fused_mlp_shapes,
    fused_mlp_shares,
)
from services.engine.models.latent_config import (
    latent_attention_shapes,
    latent_attention_shares,
)
from services.engine.models.model_config import Shard
from services.engine.models.shapes import (
    Shapes,
    Share,
    Shares,
    linear_shapes,
    shares_of_inputs,
    shares_of_outputs,
    widened,
)


@dataclass(frozen=True, slots=True)
class PartTensors:
    """The tensors of a part of a layer, by their names after the layer's: their shapes, and what one rank reads of
    each. Both functions take the layer's index last.
    """

    shapes: Callable[[DecoderConfig, int], Shapes]
    shares: Callable[[DecoderConfig, Shard, int], Shares]


def gated_mlp_shapes(config: DecoderConfig, layer: int) -> Shapes:
    """Returns the shapes of a gated MLP's tensors."""
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    gate, up = (linear_shapes(f"mlp.{name}_proj", inner, hidden, bias) for name in ("gate", "up"))
    return gate | up | linear_shapes("mlp.down_proj", hidden, inner, bias)


def gated_mlp_shares(config: DecoderConfig, shard: Shard, layer: int) -> Shares:
    """Returns the shares of a gated MLP's tensors that one rank reads."""
    gate, up = (shares_of_outputs(f"mlp.{name}_proj", shard.intermediate, config.mlp_bias) for name in ("gate", "up"))
    return gate | up | shares_of_inputs("mlp.down_proj", shard.intermediate, config.mlp_bias)


def grouped_attention_shapes(config: DecoderConfig, layer: int) -> Shapes:
    """Returns the shapes of a grouped attention's tensors."""
    hidden = config.hidden_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {}
    for name, out in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        shapes |= linear_shapes(f"self_attn.{name}", out, hidden, config.qkv_bias)
    shapes |= linear_shapes("self_attn.o_proj", hidden, q_size, config.output_bias)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    if config.wide_qk_norm:
        shapes |= {"self_attn.q_norm.weight": (q_size,), "self_attn.k_norm.weight": (kv_size,)}
    if config.attention_sinks:
        shapes["self_attn.sinks"] = (config.num_heads,)
    return shapes


def grouped_attention_shares(config: DecoderConfig, shard: Shard, layer: int) -> Shares:
    """Returns the shares of a grouped attention's tensors that one rank reads: its heads."""
    heads, kv_heads = widened(shard.heads, config.head_dim), widened(shard.kv_heads, config.head_dim)
    shares: Shares = {}
    for name, outputs in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        shares |= shares_of_outputs(f"self_attn.{name}", outputs, config.qkv_bias)
    if config.attention_sinks:
        shares["self_attn.sinks"] = Share(rows=(slice(shard.heads.start, shard.heads.stop),))
    return shares | shares_of_inputs("self_attn.o_proj", heads, config.output_bias)


def experts_or_gated_mlp(names: ExpertNames) -> PartTensors:
    """Returns the tensors of MLPs in layers with experts, and in the dense layers between them."""

    def shapes(config: DecoderConfig, layer: int) -> Shapes:
        if config.experts is None or layer not in config.experts.layers:
            return gated_mlp_shapes(config, layer)
        return expert_shapes(names, config.experts, config.hidden_size)

    def shares(config: DecoderConfig, shard: Shard, layer: int) -> Shares:
        if config.experts is None or layer not in config.experts.layers:
            return gated_mlp_shares(config, shard, layer)
        return expert_shares(names, config.experts, shard)

    return PartTensors(shapes, shares)


def latent_shapes(config: DecoderConfig, layer: int) -> Shapes:
    """Returns the shapes of a latent attention's tensors."""
    assert config.latent is not None
    biases = config.qkv_bias, config.output_bias
    return latent_attention_shapes(config.latent, config.num_heads, config.hidden_size, biases)


def latent_shares(config: DecoderConfig, shard: Shard, layer: int) -> Shares:
    """Returns the shares of a latent attention's tensors that one rank reads."""
    assert config.latent is not None
    return latent_attention_shares(config.latent, shard.heads, config.output_bias)


GATED_MLP = PartTensors(gated_mlp_shapes, gated_mlp_shares)
GROUPED_ATTENTION = PartTensors(grouped_attention_shapes, grouped_attention_shares)
FUSED_MLP = PartTensors(fused_mlp_shapes, fused_mlp_shares)
FUSED_ATTENTION = PartTensors(fused_attention_shapes, fused_attention_shares)
LATENT_ATTENTION = PartTensors(latent_shapes, latent_shares)
