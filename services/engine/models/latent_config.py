"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), read from config.json, and its tensors.

    q  = q_b(norm(q_a(x))), or q(x)                    [heads, nope_dim + rope_dim]
    latent, k_rope = kv_a(x)                           [kv_rank], [rope_dim]; the latent is normed: both are the KV
    k_nope, v = kv_b(latent)                           [heads, nope_dim], [heads, value_dim]
    output = o(softmax([q_nope, q_rope] x [k_nope, k_rope]) x v)

q_rope and k_rope are rotated; k_rope is one for all heads.
"""

import math
from collections.abc import Callable

from services.engine.attention.latent import Latent
from services.engine.models.experts_config import Experts, deepseek_v2_experts, deepseek_v3_experts
from services.engine.models.settings import ConfigSettings
from services.engine.models.shapes import Shapes, Shares, linear_shapes, shares_of_inputs, shares_of_outputs, widened

_OF_EXPERTS = (
    "moe_intermediate_size", "moe_layer_freq", "n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob",
    "num_experts", "num_experts_per_tok", "num_local_experts", "routed_scaling_factor", "scoring_func", "topk_group",
    "topk_method",
)  # fmt: skip


def deepseek_v2_latent(raw: ConfigSettings) -> Latent:
    """Returns the attention of DeepSeek-V2. Raises ModelError."""
    return _read(raw, is_interleaved=True)


def deepseek_v3_latent(raw: ConfigSettings) -> Latent:
    """Returns the attention of DeepSeek-V3, whose checkpoints may have their pairs in halves. Raises ModelError."""
    return _read(raw, is_interleaved=raw.flag("rope_interleave", True))


def _read(raw: ConfigSettings, *, is_interleaved: bool) -> Latent:
    latent = Latent(
        kv_rank=raw.integer("kv_lora_rank", 512),
        q_rank=raw.nullable_integer("q_lora_rank", 1536),
        nope_dim=raw.integer("qk_nope_head_dim", 128),
        rope_dim=raw.integer("qk_rope_head_dim", 64),
        value_dim=raw.integer("v_head_dim", 128),
        is_interleaved=is_interleaved,
        score_factor=_score_factor(raw),
    )
    if latent.rope_dim % 2:
        raise raw.refusal("qk_rope_head_dim", "is odd, the rotary embedding needs an even one")
    num_heads = raw.integer("num_attention_heads")
    for key, only, source in (
        ("num_key_value_heads", num_heads, "num_attention_heads"),
        ("head_dim", latent.rope_dim, "qk_rope_head_dim"),
        ("qk_head_dim", latent.query_dim, "qk_nope_head_dim and qk_rope_head_dim"),
    ):
        if raw.integer(key, only) != only:
            raise raw.refusal(key, f"is not supported beside {source} of latent attention (only {only})")
    return latent


def deepseek_v2_layers(raw: ConfigSettings, num_layers: int) -> Experts | None:
    """Returns the experts of DeepSeek-V2 behind its dense layers, None if all are dense. Raises ModelError."""
    return _experts(raw, num_layers, 0, deepseek_v2_experts)


def deepseek_v3_layers(raw: ConfigSettings, num_layers: int) -> Experts | None:
    """Returns the experts of DeepSeek-V3 behind its dense layers, None if all are dense. Raises ModelError."""
    return _experts(raw, num_layers, 3, deepseek_v3_experts)


def _experts(
    raw: ConfigSettings, num_layers: int, num_dense: int, read: Callable[[ConfigSettings, int], Experts]
) -> Experts | None:
    """num_dense: layers before those with experts, by default."""
    if raw.integer("first_k_dense_replace", num_dense, least=0) < num_layers:
        raw.require("mlp_bias", False)  # experts have none
        return read(raw, num_layers)
    raw.disregard(*_OF_EXPERTS)
    return None


def _score_factor(raw: ConfigSettings) -> float:
    """Returns the square of yarn's magnitude for `mscale_all_dim`, as in the code of DeepSeek-V2's authors."""
    factor = 1.0
    for section in (raw.section("rope_scaling"), raw.section("rope_parameters")):
        weight = section.value("mscale_all_dim") if _is_yarn(section) else None
        if weight:
            magnitude = max(1.0, 0.1 * section.number("mscale_all_dim") * math.log(section.number("factor")) + 1.0)
            factor = magnitude * magnitude
    return factor


def _is_yarn(section: ConfigSettings) -> bool:
    return section.text("rope_type", section.text("type")) == "yarn"


def latent_attention_shapes(latent: Latent, num_heads: int, hidden: int, biases: tuple[bool, bool]) -> Shapes:
    """Returns the shapes of a latent attention's tensors. biases: of the first products, and of the output."""
    bias, output_bias = biases
    q_width = num_heads * latent.query_dim
    if latent.q_rank is None:
        shapes = linear_shapes("self_attn.q_proj", q_width, hidden, False)
    else:
        shapes = linear_shapes("self_attn.q_a_proj", latent.q_rank, hidden, bias)
        shapes |= {"self_attn.q_a_layernorm.weight": (latent.q_rank,)}
        shapes |= linear_shapes("self_attn.q_b_proj", q_width, latent.q_rank, False)
    return (
        shapes
        | linear_shapes("self_attn.kv_a_proj_with_mqa", latent.width, hidden, bias)
        | {"self_attn.kv_a_layernorm.weight": (latent.kv_rank,)}
        | linear_shapes("self_attn.kv_b_proj", num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank, False)
        | linear_shapes("self_attn.o_proj", hidden, num_heads * latent.value_dim, output_bias)
    )


def latent_attention_shares(latent: Latent, heads: range, output_bias: bool) -> Shares:
    """Returns the shares of a latent attention's tensors that the rank with these heads reads. The latent is each
    rank's.
    """
    q_name = "q_proj" if latent.q_rank is None else "q_b_proj"
    return (
        shares_of_outputs(f"self_attn.{q_name}", widened(heads, latent.query_dim), False)
        | shares_of_outputs("self_attn.kv_b_proj", widened(heads, latent.nope_dim + latent.value_dim), False)
        | shares_of_inputs("self_attn.o_proj", widened(heads, latent.value_dim), output_bias)
    )
