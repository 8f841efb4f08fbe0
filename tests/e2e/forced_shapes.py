"""Four odd shapes of each family: heads, experts, windows and ropes that no published model has, and settings away from
their defaults; one shape of a family has every optional setting on.

Most are those of `tests/engine/test_torch_runner.py`; what a family lacks there is here.
"""

from typing import Any

from tests.checkpoints import LLAMA3_ROPE, YARN_ROPE, long_rope
from tests.engine.test_torch_runner import MULTIPLIERS
from tests.engine.test_torch_runner import SHAPES as RUNNER_SHAPES

LINEAR_ROPE: dict[str, Any] = {"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0}
_ODD: dict[str, Any] = {"num_attention_heads": 6, "hidden_size": 96, "rms_norm_eps": 1e-3}  # 3 heads of a KV head
_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa3-all-settings": (
        "llama",
        _ODD
        | {
            "head_dim": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "qwen2-mqa-llama3-rope-one-layer": (
        "qwen2",
        {"num_key_value_heads": 1, "num_hidden_layers": 1, "rope_parameters": LLAMA3_ROPE},
    ),
    "qwen2-gqa3-all-settings": (
        "qwen2",
        _ODD
        | {
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 33,
            "max_window_layers": 2,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "olmo2-gqa3-all-settings": (
        "olmo2",
        _ODD
        | {
            "head_dim": 24,
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "qwen3-gqa3-all-settings": (
        "qwen3",
        _ODD
        | {
            "head_dim": 40,
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": YARN_ROPE,
            "use_sliding_window": True,
            "sliding_window": 33,
            "max_window_layers": 2,
        },
    ),
    "mistral-gqa3-all-settings": (
        "mistral",
        _ODD | {"head_dim": 24, "sliding_window": 19, "tie_word_embeddings": True, "rope_parameters": YARN_ROPE},
    ),
    "ministral-mqa-80-one-layer-slides": (
        "ministral",
        {
            "num_key_value_heads": 1,
            "head_dim": 80,
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "ministral-all-layers-slide": ("ministral", {"sliding_window": 31, "layer_types": ["sliding_attention"] * 2}),
    "ministral-gqa3-all-settings": (
        "ministral",
        _ODD
        | {
            "head_dim": 24,
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": LINEAR_ROPE,
        },
    ),
    "mixtral-mqa-one-expert-linear-rope": (
        "mixtral",
        {"num_key_value_heads": 1, "num_experts_per_tok": 1, "num_hidden_layers": 3, "rope_parameters": LINEAR_ROPE},
    ),
    "mixtral-gqa3-all-settings": (
        "mixtral",
        _ODD
        | {
            "head_dim": 24,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 33,
            "tie_word_embeddings": True,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "qwen2-moe-mqa-one-of-three-experts": (
        "qwen2_moe",
        {"num_key_value_heads": 1, "num_experts": 3, "num_experts_per_tok": 1, "mlp_only_layers": [0]},
    ),
    "qwen2-moe-gqa3-all-settings": (
        "qwen2_moe",
        _ODD
        | {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 2,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "qwen3-moe-mqa-all-of-three-experts": (
        "qwen3_moe",
        {"num_key_value_heads": 1, "head_dim": 80, "num_experts": 3, "num_experts_per_tok": 3},
    ),
    "qwen3-moe-gqa3-all-settings": (
        "qwen3_moe",
        _ODD
        | {
            "head_dim": 24,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 21,
            "rope_parameters": LINEAR_ROPE,
        },
    ),
    "deepseek-v2-tied-wide-values": (
        "deepseek_v2",
        {"tie_word_embeddings": True, "v_head_dim": 40, "num_experts_per_tok": 1, "n_shared_experts": 1},
    ),
    "deepseek-v2-odd-heads-all-settings": (
        "deepseek_v2",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "hidden_size": 60,
            "kv_lora_rank": 18,
            "attention_bias": True,
            "num_hidden_layers": 3,
            "topk_method": "group_limited_greedy",
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.7,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek-v3-one-product-one-group": (
        "deepseek_v3",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "routed_scaling_factor": 1.0},
    ),
    "deepseek-v3-odd-heads-all-settings": (
        "deepseek_v3",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "hidden_size": 60,
            "kv_lora_rank": 18,
            "v_head_dim": 24,
            "attention_bias": True,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 2,
            "tie_word_embeddings": True,
            "rope_interleave": False,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 4.0},
        },
    ),
    "phi3-mqa-longrope-whole-heads": (
        "phi3",
        {"num_key_value_heads": 1, "sliding_window": 15, **long_rope(context=512, size=8)},
    ),
    "opt-three-heads-all-settings": (
        "opt",
        {
            "num_attention_heads": 3,
            "hidden_size": 96,
            "ffn_dim": 40,
            "num_hidden_layers": 3,
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 48,
            "tie_word_embeddings": True,
        },
    ),
    "granite-mha-24-linear-rope": (
        "granite",
        {"num_key_value_heads": 4, "head_dim": 24, "rope_parameters": LINEAR_ROPE, **MULTIPLIERS},
    ),
}
# A family's fifth and later shapes, of which the first four say as much.
_BEYOND_FOUR = {
    "llama-mha-16",
    "llama-gqa2-tied",
    "olmo2-gqa2",
    "qwen2-gqa2",
    "qwen3-gqa2-16",
    "granite-multipliers-of-1",
    "phi3-gqa2",
}
SHAPES = {name: shape for name, shape in (RUNNER_SHAPES | _OWN).items() if name not in _BEYOND_FOUR}


def names_of(family: str) -> list[str]:
    """The names of a family's shapes."""
    return [name for name, (of, _) in SHAPES.items() if of == family]
