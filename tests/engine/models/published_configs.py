"""The config.json of published models: what Baton must be able to read."""

from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.37.2",
    "use_cache": True,
    "vocab_size": 32000,
}
_LLAMA3 = _LLAMA | {
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_MIXTRAL = _MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "transformers_version": "4.36.0.dev0",
}
_QWEN2_MOE = _QWEN2 | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
_DEEPSEEK_V2: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
_DEEPSEEK_V3 = _DEEPSEEK_V2 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": _DEEPSEEK_V2["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
_GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}
_GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.55.0",
    "use_cache": True,
    "vocab_size": 201088,
}
_OPT: dict[str, Any] = {
    "_name_or_path": "facebook/opt-125m",
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "transformers_version": "4.21.0.dev0",
    "use_cache": True,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
_GRANITE = _LLAMA | {
    "architectures": ["GraniteForCausalLM"],
    "attention_multiplier": 0.015625,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "logits_scaling": 10,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 100256,
    "residual_multiplier": 0.22,
    "rope_theta": 10000000,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}
_SMOLLM3 = _LLAMA | {
    "architectures": ["SmolLM3ForCausalLM"],
    "bos_token_id": None,
    "eos_token_id": 128001,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pad_token_id": 128004,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
_PHI3: dict[str, Any] = {
    "_name_or_path": "Phi-3-mini-4k-instruct",
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2",
    "use_cache": True,
    "vocab_size": 32064,
}

_BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 384,
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "label2id": {"LABEL_0": 0},
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "transformers_version": "4.30.0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
_MODERNBERT: dict[str, Any] = {
    "architectures": ["ModernBertModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "repad_logits_with_grad": False,
    "sep_token_id": 50282,
    "sparse_pred_ignore_index": -100,
    "sparse_prediction": False,
    "torch_dtype": "float16",
    "transformers_version": "4.48.0",
    "vocab_size": 50368,
}
_FOURS: dict[str, Any] = {
    "actorder": "weight",
    "block_structure": None,
    "dynamic": False,
    "group_size": 128,
    "num_bits": 4,
    "observer": "mse",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
_COMPRESSED: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": _FOURS,
        }
    },
    "format": "pack-quantized",
    "global_compression_ratio": 1.8913,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {
        "format": "dense",
        "global_sparsity": 0.13,
        "ignore": [],
        "registry_requires_subclass": False,
        "sparsity_structure": "unstructured",
        "targets": ["Linear"],
    },
    "version": "0.7.1",
}
_BYTES = _FOURS | {"actorder": None, "group_size": None, "num_bits": 8, "strategy": "channel"}
_TOKENS = _BYTES | {"strategy": "token", "dynamic": True, "observer": None}
_GPTQ = {
    "bits": 4,
    "group_size": 128,
    "damp_percent": 0.01,
    "desc_act": False,
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
    "model_name_or_path": None,
    "model_file_base_name": "model",
    "quant_method": "gptq",
}


def _two_bytes(kind: str) -> dict[str, Any]:
    """Weights and activations of 8 bits."""
    group = _COMPRESSED["config_groups"]["group_0"]
    both = {"weights": _BYTES | {"type": kind}, "input_activations": _TOKENS | {"type": kind}}
    return _COMPRESSED | {"config_groups": {"group_0": group | both}, "format": f"{kind}-quantized"}


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2": _LLAMA | {"_name_or_path": "meta-llama/Llama-2-7b-chat-hf", "pad_token_id": 0, "max_length": 4096},
    "Llama 3.1": _LLAMA3,
    "Llama 3.2": _LLAMA3
    | {"head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"rope_scaling": _LLAMA3["rope_scaling"] | {"factor": 32.0}, "tie_word_embeddings": True},
    "Llama 3.1, fine-tuned": _LLAMA3
    | {"_attn_implementation_autoset": True, "pad_token_id": 128004, "unsloth_fixed": True, "use_cache": False}
    | {"unsloth_version": "2024.9", "neftune_noise_alpha": 5, "id2label": {"0": "LABEL_0"}},
    "Llama 3, by transformers 5": {
        key: value
        for key, value in _LLAMA3.items()
        if key not in ("rope_scaling", "rope_theta", "torch_dtype", "pretraining_tp")
    }
    | {"dtype": "bfloat16", "rope_parameters": {**_LLAMA3["rope_scaling"], "rope_theta": 500000.0}, "head_dim": 128},
    "SmolLM2": _LLAMA
    | {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}
    | {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    "DeepSeek Coder": _LLAMA | {"rope_scaling": {"factor": 4.0, "type": "linear"}, "max_position_embeddings": 16384},
    "Vicuna": _LLAMA | {"max_sequence_length": 2048, "temperature": 0.9, "top_p": 0.6, "do_sample": True},
    "Llama 3.1, scales of KV": _LLAMA3
    | {
        "quantization_config": {
            "config_groups": {},
            "format": "dense",
            "global_compression_ratio": 1.0,
            "ignore": [],
            "kv_cache_scheme": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "tensor",
                "symmetric": True,
                "type": "float",
            },
            "quant_method": "compressed-tensors",
            "quantization_status": "frozen",
            "sparsity_config": {},
            "transform_config": {},
            "version": "0.9.4",
        }
    },
    "Mistral 0.1": _MISTRAL,
    "Mistral 0.3": _MISTRAL | {"sliding_window": None, "rope_theta": 1e6, "vocab_size": 32768},
    "Mistral Nemo": _MISTRAL
    | {"head_dim": 128, "hidden_size": 5120, "num_hidden_layers": 40, "sliding_window": None, "rope_theta": 1e6}
    | {"max_position_embeddings": 131072, "vocab_size": 131072, "pad_token_id": 10, "unsloth_version": "2025.12.5"},
    "Zephyr": _MISTRAL
    | {"_name_or_path": "mistralai/Mistral-7B-v0.1", "pad_token_id": 2, "output_router_logits": False},
    "Qwen2.5": _QWEN2,
    "Qwen2.5, base": _QWEN2 | {"max_window_layers": 24, "use_mrope": False, "eos_token_id": 151643},
    "Qwen2.5, long": _QWEN2
    | {"sliding_window": 131072, "max_window_layers": 70, "tie_word_embeddings": False}
    | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "DeepSeek R1, distilled to Qwen": _QWEN2 | {"use_mrope": False, "sliding_window": 4096, "eos_token_id": 151643},
    "Qwen3": _QWEN3,
    "Qwen3, by transformers 4.57": _QWEN3 | {"layer_types": ["full_attention"] * 28, "dtype": "bfloat16"},
    "Gemma 2": _GEMMA2,
    "Gemma 3": _GEMMA3,
    "Gemma 3, by transformers 4.55": {key: value for key, value in _GEMMA3.items() if key != "sliding_window_pattern"}
    | {
        "_sliding_window_pattern": 6,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2,
    }
    | {"use_bidirectional_attention": False},
    "gpt-oss, in bfloat16": _GPT_OSS,
    "gpt-oss": _GPT_OSS
    | {
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        }
    },
    "Llama 3.1, W4A16": _LLAMA3 | {"quantization_config": _COMPRESSED},
    "Llama 3.1, W8A8": _LLAMA3 | {"quantization_config": _two_bytes("int")},
    "Llama 3.1, FP8": _LLAMA3 | {"quantization_config": _two_bytes("float")},
    "Qwen2.5, AWQ": _QWEN2
    | {
        "quantization_config": {
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        }
    },
    "Qwen2.5, GPTQ": _QWEN2 | {"quantization_config": _GPTQ},
    "Qwen3, GPTQModel": _QWEN3
    | {
        "quantization_config": {
            "bits": 8,
            "checkpoint_format": "gptq",
            "desc_act": False,
            "group_size": 128,
            "hyb_act": False,
            "lm_head": False,
            "meta": {"damp_percent": 0.01, "mse": 0.0, "quantizer": ["gptqmodel:2.2.0"], "uri": "https://github.com"},
            "pack_dtype": "int32",
            "quant_method": "gptq",
            "sym": True,
        }
    },
    "Qwen3 MoE, FP8": _QWEN3_MOE
    | {
        "quantization_config": {
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"],
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        }
    },
    "Mixtral": _MIXTRAL,
    "Qwen1.5 MoE": _QWEN2_MOE,
    "Qwen2 MoE": _QWEN2_MOE | {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560},
    "Qwen3 MoE": _QWEN3_MOE,
    "Qwen3 MoE, by transformers 5": {key: value for key, value in _QWEN3_MOE.items() if key != "num_experts"}
    | {"num_local_experts": 128, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}},
    "DeepSeek V2 Lite": _DEEPSEEK_V2,
    "DeepSeek V2": _DEEPSEEK_V2
    | {"hidden_size": 5120, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "n_group": 8}
    | {"num_hidden_layers": 60, "intermediate_size": 12288, "moe_intermediate_size": 1536}
    | {"n_routed_experts": 160, "topk_group": 3, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    "DeepSeek V3, in bfloat16": _DEEPSEEK_V3,
    "DeepSeek V3": _DEEPSEEK_V3
    | {
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        }
    },
    "Moonlight": _DEEPSEEK_V3
    | {"q_lora_rank": None, "num_attention_heads": 16, "num_key_value_heads": 16, "n_group": 1, "topk_group": 1}
    | {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "rope_scaling": None},
    "Granite 4.1": _GRANITE,
    "Granite, without multipliers and with both names of its rope": _GRANITE
    | {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0, "tie_word_embeddings": False}
    | {"rope_parameters": {"rope_theta": 10000000, "rope_type": "default"}},
    "OLMo 2": _LLAMA
    | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 2048, "intermediate_size": 8192}
    | {"num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-06}
    | {"rope_theta": 500000, "vocab_size": 100352},
    "SmolLM3, base": _SMOLLM3,
    "SmolLM3": _SMOLLM3
    | {"layer_types": ["full_attention"] * 36, "max_window_layers": 28, "mlp_bias": False}
    | {"no_rope_layers": [1, 1, 1, 0] * 9},
    "Phi 3, 4k": _PHI3,
    "Phi 3, 128k, of its first day": _PHI3
    | {"rope_scaling": {"type": "su", "short_factor": [1.05] * 48, "long_factor": [1.08] * 48}}
    | {"max_position_embeddings": 131072, "sliding_window": 262144},
    "Phi 4 mini": _PHI3
    | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [32.03] * 48}}
    | {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}
    | {"num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "sliding_window": 262144}
    | {"max_position_embeddings": 131072, "tie_word_embeddings": True, "vocab_size": 200064}
    | {"bos_token_id": 199999, "eos_token_id": 199999, "pad_token_id": 199999},
    "OPT": _OPT,
    "OPT 350m": _OPT | {"do_layer_norm_before": False, "hidden_size": 1024, "num_attention_heads": 16, "ffn_dim": 4096},
    "OPT, by transformers 4.40": _OPT | {"enable_bias": True, "layer_norm_elementwise_affine": True},
    "BGE small": _BERT,
    "E5, multilingual": _BERT
    | {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "hidden_size": 768, "layer_norm_eps": 1e-5}
    | {"intermediate_size": 3072, "max_position_embeddings": 514, "pad_token_id": 1, "bos_token_id": 0}
    | {"eos_token_id": 2, "output_past": True, "type_vocab_size": 1, "vocab_size": 250002},
    "RoBERTa large": _BERT
    | {"architectures": ["RobertaModel"], "model_type": "roberta", "hidden_size": 1024, "num_hidden_layers": 24}
    | {"num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 514, "pad_token_id": 1}
    | {"layer_norm_eps": 1e-5, "type_vocab_size": 1, "vocab_size": 50265},
    "GTE ModernBERT": _MODERNBERT,
    "ModernBERT, by transformers 5": {
        key: value
        for key, value in _MODERNBERT.items()
        if key not in ("global_rope_theta", "local_rope_theta", "torch_dtype")
    }
    | {"dtype": "float32", "layer_types": ["full_attention", *["sliding_attention"] * 2] * 7 + ["full_attention"]}
    | {
        "rope_parameters": {
            "full_attention": {"rope_theta": 160000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        }
    }
    | {"tie_word_embeddings": True},
    "GTE ModernBERT, reranker": _MODERNBERT
    | {"architectures": ["ModernBertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    | {"label2id": {"LABEL_0": 0}},
    "MS MARCO MiniLM, reranker": _BERT
    | {"architectures": ["BertForSequenceClassification"], "hidden_size": 384, "intermediate_size": 1536}
    | {
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "num_hidden_layers": 6,
        "gradient_checkpointing": False,
    }
    | {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    "BGE reranker": _BERT
    | {"architectures": ["XLMRobertaForSequenceClassification"], "model_type": "xlm-roberta", "hidden_size": 768}
    | {"intermediate_size": 3072, "max_position_embeddings": 514, "pad_token_id": 1, "bos_token_id": 0}
    | {"eos_token_id": 2, "type_vocab_size": 1, "vocab_size": 250002, "layer_norm_eps": 1e-5},
}
