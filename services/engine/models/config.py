"""The decoder's shape, read from a Hugging Face config.json, and the tensors that a checkpoint must have for it.

One parametrised decoder serves every family; the differences of a family are its entry in `FAMILIES`. A setting that
would change the computation and is not implemented is refused by name: no setting is accepted and ignored.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from services.engine.attention.latent import Latent
from services.engine.models.expert_tensors import (
    DEEPSEEK,
    GPT_OSS,
    MIXTRAL,
    QWEN,
    ExpertNames,
    expert_shapes,
    expert_shares,
)
from services.engine.models.experts_config import (
    Experts,
    gpt_oss_experts,
    mixtral_experts,
    qwen2_experts,
    qwen3_experts,
)
from services.engine.models.fused_tensors import (
    fused_attention_shapes,
    fused_attention_shares,
    fused_mlp_shapes,
    fused_mlp_shares,
)
from services.engine.models.gemma_settings import gemma2_settings, gemma3_settings
from services.engine.models.granite_settings import granite_settings
from services.engine.models.latent_config import (
    deepseek_v2_latent,
    deepseek_v2_layers,
    deepseek_v3_latent,
    deepseek_v3_layers,
    latent_attention_shapes,
    latent_attention_shares,
)
from services.engine.models.model_config import ModelConfig, Shard, read_dtype
from services.engine.models.rope_settings import (
    GPT_OSS_ROPE,
    PLAIN_ROPE,
    ROPE_OF_ALL_LENGTHS,
    DynamicScaling,
    FrequencyFactors,
    LongRopeScaling,
    Rope,
    RopeRules,
    parse_partial_rotary_factor,
    parse_rope,
    parse_ropes_of_types,
)
from services.engine.models.settings import ConfigSettings
from services.engine.models.shapes import (
    Shapes,
    Share,
    Shares,
    linear_shapes,
    shares_of_inputs,
    shares_of_outputs,
    widened,
)
from services.engine.models.smollm3_settings import smollm3_settings
from services.engine.models.window_settings import (
    Windows,
    no_window,
    slides_by_turns,
    window_if_used,
    window_of_all_layers,
    window_shorter_than_context,
    windows_by_turns,
    windows_of_layers_without_rope,
    windows_of_marked_layers,
    windows_of_typed_layers,
)
from services.protocol.model_files.base import ModelError


@dataclass(frozen=True, slots=True)
class PartTensors:
    """The tensors of a part of a layer, by their names after the layer's: their shapes, and what one rank reads of
    each. Both functions take the layer's index last.
    """

    shapes: Callable[["DecoderConfig", int], Shapes]
    shares: Callable[["DecoderConfig", Shard, int], Shares]


def gated_mlp_shapes(config: "DecoderConfig", layer: int) -> Shapes:
    """Returns the shapes of a gated MLP's tensors."""
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    gate, up = (linear_shapes(f"mlp.{name}_proj", inner, hidden, bias) for name in ("gate", "up"))
    return gate | up | linear_shapes("mlp.down_proj", hidden, inner, bias)


def gated_mlp_shares(config: "DecoderConfig", shard: Shard, layer: int) -> Shares:
    """Returns the shares of a gated MLP's tensors that one rank reads."""
    gate, up = (shares_of_outputs(f"mlp.{name}_proj", shard.intermediate, config.mlp_bias) for name in ("gate", "up"))
    return gate | up | shares_of_inputs("mlp.down_proj", shard.intermediate, config.mlp_bias)


def grouped_attention_shapes(config: "DecoderConfig", layer: int) -> Shapes:
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


def grouped_attention_shares(config: "DecoderConfig", shard: Shard, layer: int) -> Shares:
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

    def shapes(config: "DecoderConfig", layer: int) -> Shapes:
        if config.experts is None or layer not in config.experts.layers:
            return gated_mlp_shapes(config, layer)
        return expert_shapes(names, config.experts, config.hidden_size)

    def shares(config: "DecoderConfig", shard: Shard, layer: int) -> Shares:
        if config.experts is None or layer not in config.experts.layers:
            return gated_mlp_shares(config, shard, layer)
        return expert_shares(names, config.experts, shard.part)

    return PartTensors(shapes, shares)


def latent_shapes(config: "DecoderConfig", layer: int) -> Shapes:
    """Returns the shapes of a latent attention's tensors."""
    assert config.latent is not None
    biases = config.qkv_bias, config.output_bias
    return latent_attention_shapes(config.latent, config.num_heads, config.hidden_size, biases)


def latent_shares(config: "DecoderConfig", shard: Shard, layer: int) -> Shares:
    """Returns the shares of a latent attention's tensors that one rank reads."""
    assert config.latent is not None
    return latent_attention_shares(config.latent, shard.heads, config.output_bias)


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The RMSNorms of a layer, by their tensors' names after the layer's. None: there is no such norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of those that there are."""
        all_four = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in all_four if name is not None)


FOUR_NORMS = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
GATED_MLP = PartTensors(gated_mlp_shapes, gated_mlp_shares)
GROUPED_ATTENTION = PartTensors(grouped_attention_shapes, grouped_attention_shares)
FUSED_MLP = PartTensors(fused_mlp_shapes, fused_mlp_shares)
FUSED_ATTENTION = PartTensors(fused_attention_shapes, fused_attention_shares)
LATENT_ATTENTION = PartTensors(latent_shapes, latent_shares)


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of an architecture from the plain decoder."""

    model_type: str  # in config.json
    qkv_bias: bool = False  # Q, K and V always have a bias
    optional_biases: tuple[str, ...] = ()  # config.json's attention_bias, qkv_bias, mlp_bias, if the family heeds them
    qk_norm: bool = False  # RMSNorm over each head of Q and K, before the rotary embedding
    wide_qk_norm: bool = False  # RMSNorm over all heads of Q, and of K
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    default_eps: float = 1e-6  # of norms
    default_theta: float = 10000.0  # of the rope
    default_local_theta: float | None = None  # of the rope of layers with a window; None: all layers have one rope
    rope: RopeRules = PLAIN_ROPE
    default_rope: Rope | None = None  # if config.json says nothing of one; None: the plain rope
    norms: LayerNorms = LayerNorms()
    norm_offset: float | None = None  # see `DecoderConfig`
    tied_by_default: bool = False  # the output layer is the embedding unless config.json says otherwise
    activation: str = "silu"  # the only one of MLPs: config.json's hidden_act
    attention_sinks: bool = False  # a learned score of each head for a key without a value
    biased_by_default: bool = False  # attention has biases unless config.json says otherwise
    own_settings: Callable[[ConfigSettings], dict[str, Any]] | None = None  # config.json to fields of `DecoderConfig`
    windows: Callable[[ConfigSettings], Windows] = no_window  # reads config.json
    experts: Callable[[ConfigSettings, int], Experts | None] | None = None  # reads config.json, for so many layers
    latent: Callable[[ConfigSettings], Latent] | None = None  # reads config.json; None: attention is grouped
    default_mtp_layers: int | None = None  # `num_nextn_predict_layers` by default; None: there are no such layers
    attention: PartTensors = GROUPED_ATTENTION
    mlp: PartTensors = GATED_MLP


FAMILIES = {
    "LlamaForCausalLM": Family("llama", optional_biases=("attention_bias", "mlp_bias")),
    "MinistralForCausalLM": Family("ministral", windows=windows_of_typed_layers),
    "MistralForCausalLM": Family("mistral", windows=window_of_all_layers),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, windows=windows_of_marked_layers),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        optional_biases=("attention_bias",),
        qk_norm=True,
        default_head_dim=128,
        windows=windows_of_marked_layers,
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        optional_biases=("attention_bias",),
        default_head_dim=256,
        windows=windows_by_turns,
        norms=FOUR_NORMS,
        norm_offset=1.0,
        tied_by_default=True,
        activation="gelu_pytorch_tanh",
        own_settings=gemma2_settings,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        optional_biases=("attention_bias",),
        qk_norm=True,
        default_head_dim=256,
        default_theta=1e6,
        default_local_theta=10000.0,
        windows=partial(windows_by_turns, every=6, key="sliding_window_pattern"),
        norms=FOUR_NORMS,
        norm_offset=1.0,
        tied_by_default=True,
        activation="gelu_pytorch_tanh",
        own_settings=gemma3_settings,
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        optional_biases=("attention_bias",),
        default_head_dim=64,
        default_eps=1e-5,
        default_theta=150000.0,
        default_rope=GPT_OSS_ROPE,
        windows=partial(windows_by_turns, default=128),
        norm_offset=0.0,
        attention_sinks=True,
        biased_by_default=True,
        experts=gpt_oss_experts,
        mlp=experts_or_gated_mlp(GPT_OSS),
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        default_eps=1e-5,
        default_theta=1e6,
        windows=partial(window_of_all_layers, default=None),
        experts=mixtral_experts,
        mlp=experts_or_gated_mlp(MIXTRAL),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        optional_biases=("qkv_bias",),
        windows=partial(windows_of_marked_layers, slides=slides_by_turns),
        experts=qwen2_experts,
        mlp=experts_or_gated_mlp(QWEN),
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        optional_biases=("attention_bias",),
        qk_norm=True,
        windows=window_if_used,
        experts=qwen3_experts,
        mlp=experts_or_gated_mlp(QWEN),
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        optional_biases=("attention_bias", "mlp_bias"),
        latent=deepseek_v2_latent,
        experts=deepseek_v2_layers,
        attention=LATENT_ATTENTION,
        mlp=experts_or_gated_mlp(DEEPSEEK),
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        optional_biases=("attention_bias",),
        latent=deepseek_v3_latent,
        default_mtp_layers=1,
        experts=deepseek_v3_layers,
        attention=LATENT_ATTENTION,
        mlp=experts_or_gated_mlp(DEEPSEEK),
    ),
    "GraniteForCausalLM": Family(
        "granite", optional_biases=("attention_bias", "mlp_bias"), own_settings=granite_settings
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        optional_biases=("attention_bias",),
        default_eps=1e-5,
        wide_qk_norm=True,
        norms=LayerNorms(
            before_attention=None,
            after_attention="post_attention_layernorm",
            before_mlp=None,
            after_mlp="post_feedforward_layernorm",
        ),
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        optional_biases=("attention_bias", "mlp_bias"),
        default_theta=2e6,
        windows=windows_of_layers_without_rope,
        tied_by_default=True,
        own_settings=smollm3_settings,
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        default_eps=1e-5,
        rope=RopeRules(
            is_partial=True,
            kinds=("default", "longrope"),
            renamed=(("su", "longrope"), ("yarn", "longrope")),
            default_context=4096,
        ),
        windows=window_shorter_than_context,
        attention=FUSED_ATTENTION,
        mlp=FUSED_MLP,
    ),
}


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
    latent: Latent | None = None  # of multi-head latent attention; KV then has one head, as wide as a latent

    def shard(self, rank: int, size: int) -> Self:
        """See `ModelConfig.shard`. Each rank has a part of the columns of every expert. A norm over all heads is
        refused: each rank would have to know the others' heads.
        """
        if self.wide_qk_norm and size > 1:
            raise ModelError(f"{size} ranks cannot share heads that have one norm of Q and K for all of them")
        own = ModelConfig.shard(self, rank, size)
        return own if self.experts is None else replace(own, experts=self.experts.shard(size))

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


def parse_decoder_config(raw: ConfigSettings, architecture: str) -> DecoderConfig:
    """Returns the shape that config.json's values describe for a family. Raises ModelError."""
    family = FAMILIES[architecture]
    raw.require("hidden_act", family.activation)
    hidden_size, num_heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    latent = None if family.latent is None else family.latent(raw)
    if latent is None:
        num_kv_heads, head_dim = _kv_heads(raw, family, num_heads, hidden_size // num_heads)
        partial_rotary_factor = parse_partial_rotary_factor(raw) if family.rope.is_partial else 1.0
        rotary_dim = int(head_dim * partial_rotary_factor)
    else:
        num_kv_heads, head_dim, rotary_dim = 1, latent.width, latent.rope_dim
        partial_rotary_factor = 1.0
    max_position_embeddings = raw.integer("max_position_embeddings")
    rope, local_rope = _parse_ropes(raw, family, max_position_embeddings)
    _check_rotary_dim(rope, rotary_dim)
    is_causal, windows = raw.flag("is_causal", True), family.windows(raw)
    plain = latent is None and family.own_settings is None and not family.attention_sinks
    if not is_causal and not (plain and windows == Windows()):
        words = "beside a sliding window" if plain else "for this architecture"
        raise raw.refusal("is_causal", f"is not supported {words}")
    attention_bias, mlp_bias = (_has_bias(raw, key, family) for key in ("attention_bias", "mlp_bias"))
    qkv_bias = family.qkv_bias or ("qkv_bias" in family.optional_biases and raw.flag("qkv_bias", True))
    num_layers = raw.integer("num_hidden_layers")
    config = DecoderConfig(
        architecture=architecture,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.number("rms_norm_eps", family.default_eps),
        max_position_embeddings=max_position_embeddings,
        rope=rope,
        window=windows.widest,
        windows=windows.of_layers,
        is_causal=is_causal,
        qk_norm=family.qk_norm,
        qkv_bias=qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
        experts=None if family.experts is None else family.experts(raw, num_layers),
        tie_word_embeddings=raw.flag("tie_word_embeddings", family.tied_by_default),
        dtype=read_dtype(raw),
        num_mtp_layers=0 if family.default_mtp_layers is None else _num_mtp_layers(raw, family.default_mtp_layers),
        latent=latent,
        norm_offset=family.norm_offset,
        wide_qk_norm=family.wide_qk_norm,
        partial_rotary_factor=partial_rotary_factor,
        activation=family.activation,
        local_rope=local_rope,
        attention_sinks=family.attention_sinks,
    )
    return config if family.own_settings is None else replace(config, **family.own_settings(raw))


def _num_mtp_layers(raw: ConfigSettings, default: int) -> int:
    """Returns the layers for the prediction of further tokens, under either name."""
    newer = raw.integer("num_mtp_layers", default, least=0)
    return raw.integer("num_nextn_predict_layers", newer, least=0)


def _kv_heads(raw: ConfigSettings, family: Family, num_heads: int, plain_head_dim: int) -> tuple[int, int]:
    """Returns the number of KV heads and their width."""
    num_kv_heads = raw.integer("num_key_value_heads", num_heads)
    head_dim = raw.integer("head_dim", family.default_head_dim or plain_head_dim)
    if num_heads % num_kv_heads:
        raise raw.refusal("num_key_value_heads", f"cannot be shared evenly by {num_heads} attention heads")
    if head_dim < 1 or head_dim % 2:
        raise ModelError(
            f"config.json: head_dim (by default hidden_size / num_attention_heads) is {head_dim}, the rotary embedding "
            "needs an even one"
        )
    return num_kv_heads, head_dim


def decoder_shapes(config: DecoderConfig) -> Shapes:
    """Returns the shapes of all tensors that a checkpoint of this shape must have."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes |= {f"{layer_prefix(layer)}{name}": shape for name, shape in _layer_shapes(config, layer).items()}
    return shapes


def decoder_shares(config: DecoderConfig, shard: Shard) -> Shares:
    """Returns the shares of tensors that one rank reads: its heads, and its columns of the MLP."""
    family = FAMILIES[config.architecture]
    shares: Shares = {}
    for layer in range(config.num_layers):
        of_layer = family.attention.shares(config, shard, layer) | family.mlp.shares(config, shard, layer)
        shares |= {f"{layer_prefix(layer)}{name}": share for name, share in of_layer.items()}
    return shares


def layer_prefix(layer: int) -> str:
    """Returns how the names of a layer's tensors begin."""
    return f"model.layers.{layer}."


def _parse_ropes(raw: ConfigSettings, family: Family, context: int) -> tuple[Rope, Rope | None]:
    """Returns the rope, and that of layers with a window if it is another one."""
    if family.default_local_theta is not None:
        return parse_ropes_of_types(raw, context, family.default_theta, family.default_local_theta)
    if family.default_rope is not None and not raw.section("rope_scaling") and not raw.section("rope_parameters"):
        return replace(family.default_rope, theta=raw.number("rope_theta", family.default_rope.theta)), None
    rules = family.rope if family.latent is None else ROPE_OF_ALL_LENGTHS
    return parse_rope(raw, context, family.default_theta, rules), None


def _check_rotary_dim(rope: Rope, rotary_dim: int) -> None:
    """Raises ModelError unless a rope fits heads of which so many numbers are rotated."""
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"config.json: partial_rotary_factor rotates {rotary_dim} numbers of a head, an even number is needed"
        )
    match rope.scaling:
        case FrequencyFactors(factors):
            lists = [factors]
        case LongRopeScaling(short_factors=short, long_factors=long):
            lists = [short, long]
        case DynamicScaling() if rotary_dim == 2:
            raise ModelError("config.json: a dynamic rope needs more than 2 numbers of a head")
        case _:
            lists = []
    for factors in lists:
        if len(factors) != rotary_dim // 2:
            raise ModelError(f"config.json: {len(factors)} factors of the rope, for {rotary_dim} numbers of a head")


def _has_bias(raw: ConfigSettings, key: str, family: Family) -> bool:
    """Returns True if the setting asks for biases that the family does not always have."""
    if key in family.optional_biases:
        return raw.flag(key, key == "attention_bias" and family.biased_by_default)
    if key == "attention_bias" and family.qkv_bias:
        raw.disregard(key)  # such models have their biases whatever it says, and tensors that fit nothing else
    else:
        raw.require(key, False)
    return False


def _layer_shapes(config: DecoderConfig, layer: int) -> Shapes:
    family, hidden = FAMILIES[config.architecture], config.hidden_size
    norms: Shapes = {f"{name}.weight": (hidden,) for name in family.norms.names}
    return norms | family.attention.shapes(config, layer) | family.mlp.shapes(config, layer)
