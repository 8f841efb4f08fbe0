"""The families of decoders: what each differs in from the plain one, in settings of config.json and in parts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from services.engine.attention.latent import Latent
from services.engine.models.expert_tensors import (
    DEEPSEEK,
    GPT_OSS,
    MIXTRAL,
    QWEN,
)
from services.engine.models.experts_config import (
    Experts,
    gpt_oss_experts,
    mixtral_experts,
    qwen2_experts,
    qwen3_experts,
)
from services.engine.models.gemma_settings import gemma2_settings, gemma3_settings
from services.engine.models.granite_settings import granite_settings
from services.engine.models.latent_config import (
    deepseek_v2_latent,
    deepseek_v2_layers,
    deepseek_v3_latent,
    deepseek_v3_layers,
)
from services.engine.models.part_tensors import (
    FUSED_ATTENTION,
    FUSED_MLP,
    GATED_MLP,
    GROUPED_ATTENTION,
    LATENT_ATTENTION,
    PartTensors,
    experts_or_gated_mlp,
)
from services.engine.models.rope_config import Rope
from services.engine.models.rope_settings import GPT_OSS_ROPE, PLAIN_ROPE, RopeRules
from services.engine.models.settings import ConfigSettings
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
    scores: bool = False  # a head for a score is in the place of the output layer
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
        norm_offset=0.0,
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
FAMILIES |= {
    f"{name}ForSequenceClassification": replace(FAMILIES[f"{name}ForCausalLM"], scores=True)
    for name in ("Llama", "Qwen2", "Qwen3")
}
