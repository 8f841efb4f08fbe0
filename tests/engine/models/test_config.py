"""config.json, in both styles, and every setting that is refused by name."""

from typing import Any

import pytest

from services.engine.models.config import Llama3Scaling, Rope, parse_model_config
from services.protocol.model_dir import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_what_a_llama_config_leaves_out_has_the_familys_defaults() -> None:
    config = parse_model_config(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert config.rope == Rope(10000.0)
    assert [config.qk_norm, config.attention_bias, config.mlp_bias, config.tie_word_embeddings] == [False] * 4
    assert config.dtype is None


def test_qwen3_has_qk_norm_and_a_head_dim_of_its_own() -> None:
    config = parse_model_config(LLAMA | {"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True})
    assert (config.qk_norm, config.head_dim, config.mlp_bias) == (True, 128, False)


def test_both_styles_of_rope_settings_mean_the_same() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALING}}
    older = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALING}}
    new = LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **SCALING}}
    expected = Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert [parse_model_config(raw).rope for raw in (old, older, new)] == [expected] * 3


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_has_two_names(key: str) -> None:
    assert parse_model_config(LLAMA | {key: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"dtype": "int8"}, "int8"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model_config(LLAMA | change)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
