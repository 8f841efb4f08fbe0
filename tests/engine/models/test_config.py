"""config.json, in both styles, and every setting that is refused by name."""

import json
from typing import Any

import pytest

from services.engine.models.architectures import parse_model_config
from services.engine.models.config import DecoderConfig
from services.engine.models.model_config import described
from services.engine.models.rope_config import Llama3Scaling, Rope
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.info import CONFIG_KEYS
from tests.engine.models.published_configs import PUBLISHED

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
OPT: dict[str, Any] = LLAMA | {"architectures": ["OPTForCausalLM"], "ffn_dim": 96, "intermediate_size": None}
KV_SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
KV_ONLY = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "ignore": ["lm_head"],
    "kv_cache_scheme": KV_SCHEME,
}
CAPPED = {"attn_logit_softcapping": 50.0}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(family: str = "Llama", **changes: Any) -> DecoderConfig:
    """The config of a decoder of this family."""
    config = parse_model_config(LLAMA | {"architectures": [f"{family}ForCausalLM"]} | changes)
    assert isinstance(config, DecoderConfig)
    return config


def test_what_a_llama_config_leaves_out_has_the_familys_defaults() -> None:
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.rope, config.window, config.dtype) == (Rope(10000.0), None, None)
    assert [config.qk_norm, config.qkv_bias, config.output_bias, config.mlp_bias] == [False] * 4
    assert not config.tie_word_embeddings


def test_qwen3_has_qk_norm_and_a_head_dim_of_its_own() -> None:
    config = parse("Qwen3")
    assert (config.qk_norm, config.head_dim, config.mlp_bias) == (True, 128, False)


@pytest.mark.parametrize(
    ("family", "changes", "biases"),
    [
        ("Llama", {"attention_bias": True}, (True, True, False)),
        ("Llama", {"mlp_bias": True}, (False, False, True)),
        ("Mistral", {"attention_bias": False}, (False, False, False)),
        ("Qwen2", {}, (True, False, False)),
        ("Qwen2", {"attention_bias": False}, (True, False, False)),  # they are there all the same
        ("Qwen3", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_which_biases_there_are(family: str, changes: dict[str, Any], biases: tuple[bool, ...]) -> None:
    """In Q, K and V; in the attention's output; in the MLP."""
    config = parse(family, **changes)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == biases


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("Mistral", {}, 4096),
        ("Mistral", {"sliding_window": 7}, 7),
        ("Mistral", {"sliding_window": None}, None),
        ("Qwen2", {"sliding_window": 7}, None),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 7}, None),  # from layer 28 on, and there are two
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}, 7),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention"] * 2}, 7),
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 0, "max_window_layers": 70}, None),
        ("Llama", {"sliding_window": 512, "use_sliding_window": False, "max_window_layers": 21}, None),
        ("Mistral", {"sliding_window": None, "use_sliding_window": False}, None),
    ],
)
def test_how_far_a_layer_looks_back(family: str, changes: dict[str, Any], window: int | None) -> None:
    assert parse(family, **changes).window == window


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("Mistral", {"sliding_window": 7}, ()),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, (None, 7)),
        (
            "Qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (5, None),
        ),
        ("Ministral", {"sliding_window": 5}, ()),
        ("Ministral", {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}, (None, 5)),
    ],
)
def test_layers_that_look_back_differently(
    family: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    """As long as a layer sees everything, so does the model, whose sequences keep all their blocks."""
    config = parse(family, **changes)
    assert config.windows == windows
    assert (config.window is None) == bool(windows)


def test_fields_with_their_defaults_are_in_no_digest() -> None:
    """A version with more fields gives the weights of a model that uses none of them the same name."""
    plain, windowed = parse("Ministral"), parse("Ministral", layer_types=["full_attention", "sliding_attention"])
    assert not {"sharded", "windows"} & described(plain).keys()
    assert described(windowed)["windows"] == (None, 4096)


def test_both_styles_of_rope_settings_mean_the_same() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALING}}
    older = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALING}}
    new = LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **SCALING}}
    expected = Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert [parse_model_config(raw).rope for raw in (old, older, new)] == [expected] * 3


@pytest.mark.parametrize("beside", [None, {}, {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}])
def test_rope_settings_that_say_the_same_may_lie_side_by_side(beside: dict[str, Any] | None) -> None:
    expected = parse(rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **SCALING})
    both = parse(rope_theta=5e5, rope_scaling={"type": "llama3", **SCALING}, rope_parameters=beside)
    assert both.rope == expected.rope


def test_numbers_that_a_model_has_not_are_in_no_digest_of_it() -> None:
    """So that the names of its blocks stay what they were before there were such numbers."""
    assert not {"experts", "sharded"} & described(parse()).keys()
    assert described(parse())["window"] is None
    mixture = described(parse_model_config(PUBLISHED["Mixtral"]))
    assert json.loads(json.dumps(mixture))["experts"]["num_experts"] == 8


def test_two_names_of_the_dtype_must_agree() -> None:
    assert parse(dtype="bfloat16", torch_dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(ModelError, match="dtype is 'float16', but torch_dtype is 'bfloat16'"):
        parse(dtype="float16", torch_dtype="bfloat16")


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"dtype": None, "torch_dtype": "bfloat16"}])
def test_dtype_has_two_names(changes: dict[str, Any]) -> None:
    assert parse_model_config(LLAMA | changes).dtype == "bfloat16"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read(name: str) -> None:
    """Their config.json as they are, with all that tools for training and older versions left in them."""
    raw = PUBLISHED[name]
    config = parse_model_config(raw)
    assert (config.num_layers, config.vocab_size) == (raw["num_hidden_layers"], raw["vocab_size"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_with_one_setting_more_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json: some_scale 2\.0 is not supported"):
        parse_model_config(PUBLISHED[name] | {"some_scale": 2.0})


@pytest.mark.parametrize(("setting", "is_unknown"), [("use_mrope", False), ("some_multiplier", True)])
def test_nobody_is_told_to_remove_a_setting_that_matters(setting: str, is_unknown: bool) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model_config(LLAMA | {setting: True})
    assert ("remove it" in str(caught.value)) == is_unknown


def test_what_the_gateway_reads_of_config_json_is_taken_as_read() -> None:
    assert parse(eos_token_id=[1, 2]) == parse()
    assert "eos_token_id" in CONFIG_KEYS


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_scaling: short_factor None"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "factor"),
        ({"rope_scaling": {"type": "proportional", "factor": 4.0}}, "'proportional'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}}, "rope_scaling: finetuned True"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "rope_scaling: mrope_section [1, 2]"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": 40}}, "beta_fast"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor is '4'"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window is 0"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 2}, "'full_attention'"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["linear", "full"]},
            "linear",
        ),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["sliding_attention", "full_attention"]}, "'full_"),
        (
            {
                "architectures": ["MinistralForCausalLM"],
                "sliding_window": None,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "sliding_window None",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 2}, "'sliding_attention'"),
        (OPT | {"activation_function": "gelu"}, "activation_function 'gelu'"),
        (OPT | {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        (OPT | {"num_attention_heads": 5}, "num_attention_heads 5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"dtype": "int8"}, "int8"),
        ({"is_causal": None}, "is_causal is None"),
        ({"some_multiplier": 2.0}, "some_multiplier 2.0"),
        ({"per_layer_config": {"1": {"rms_norm_eps": 0.1}}}, "per_layer_config {'1': {'rms_norm_eps': 0.1}}"),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias True"),
        ({"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True}, "mlp_bias True"),
        ({"sliding_window": 7}, "sliding_window 7"),
        ({"architectures": ["MistralForCausalLM"], "use_sliding_window": False}, "use_sliding_window False"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "mistral"}, "model_type 'mistral' contradicts architectures"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 5e5}}, "rope_parameters differ"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters: full_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": None}}, "truncate is None"),
        (OPT | {"rope_theta": 500.0}, "rope_theta 500.0"),
        (OPT | {"head_dim": 32}, "head_dim 32"),
        (
            {"quantization_config": KV_ONLY | {"sparsity_config": {"format": "sparse-24-bitmask"}}},
            "quantization_config: sparsity",
        ),
        ({"quantization_config": KV_ONLY | {"kv_cache_scheme": KV_SCHEME | {"strategy": "token"}}}, "scheme: strategy"),
        ({"quantization_config": "awq"}, "quantization_config is 'awq'"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type is ['yarn']"),
        ({"architectures": [{}]}, "architectures is [{}]"),
        ({"quantization_config": {"quant_method": "mxfp4", "block_size": 16}}, "quantization_config: block_size 16"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "hidden_act": "gelu_pytorch_tanh"} | CAPPED,
            "attn_logit_softcapping",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": "2"}, "max_window"),
        ({"num_attention_heads": 128}, "num_attention_heads"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model_config(LLAMA | change)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
