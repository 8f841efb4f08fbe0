"""Settings of config.json that nobody reads because they mean nothing for what Baton computes.

Everything else that is not read is refused. Names of settings in an object have its name before them. The names are
those of the configuration classes of `transformers`, of older versions too, and of what tools for training write.
"""

from typing import Any

from services.protocol.model_files.info import CONFIG_KEYS

# By the reason: settings that are harmless whatever their value is.
_OF_ANY_VALUE = {
    "services/protocol/model_files/info.py reads them, for gateway and workers": CONFIG_KEYS,
    "names, versions and ways to load a checkpoint, for people and for other programs": {
        "_commit_hash", "_from_auto", "_name_or_path", "_auto_class", "auto_map", "custom_pipelines", "is_llama_config",
        "jax", "license", "name_or_path", "paddlenlp_version", "processor_class", "tokenizer_class",
        "torchscript", "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version",
        "use_bfloat16",
    },
    "training alone: dropout, first weights, losses, memory": {
        "activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "aux_loss_alpha",
        "classifier_dropout", "seq_aux",
        "dropout", "embd_pdrop", "ffn_dropout", "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob",
        "init_std", "initializer_factor", "initializer_range", "label_smoothing", "layerdrop", "loss_type",
        "neftune_noise_alpha", "output_router_logits", "resid_pdrop", "residual_dropout", "router_aux_loss_coef",
        "router_jitter_noise", "use_recompute",
    },
    "the same numbers, computed in another order or kept in another way": {
        "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
        "_experts_implementation", "_experts_implementation_internal", "_flash_attn_2_enabled", "attn_implementation",
        "cache_implementation", "chunk_size_feed_forward", "ep_size", "experts_implementation", "flash_attn",
        "fuse_attention_ffn", "fuse_attention_qkv", "fused_rms_norm", "pretraining_tp", "tensor_parallel_degree",
        "use_cache", "use_flash_attention", "use_flash_attention_2", "use_flash_attn", "use_fused_rms_norm",
        "use_fused_rope", "use_sdpa",
    },
    "what a call of `transformers` returns beside the logits": {
        "output_attentions", "output_hidden_states", "return_dict", "tie_last_hidden_states", "use_return_dict",
    },
    "models with another head than that of a language model": {
        "classifier_activation", "finetuning_task", "id2label", "label2id", "num_labels", "problem_type",
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    },
    "tokens that the tokenizer's files and generation_config.json name": {
        "bos_token_id", "cls_token_id", "decoder_start_token_id", "mask_token_id", "pad_token_id", "prefix",
        "sep_token_id", "unk_token_id",
    },
    "lengths that say no more than max_position_embeddings": {
        "initial_context_length", "max_seq_len", "max_sequence_length", "model_max_length", "seq_len", "seq_length",
    },
    "defaults of sampling: `transformers` reads generation_config.json alone": {
        "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
        "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty",
        "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "min_length",
        "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups",
        "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
        "return_dict_in_generate", "suppress_tokens", "target_lookbehind", "task_specific_params", "temperature",
        "top_k", "top_p", "typical_p",
    },
    "other libraries' names for an encoder or a decoder; decoders alone are read": {"is_decoder", "tf_legacy_loss"},
}  # fmt: skip

# Settings that change results, with the values that change nothing.
_OFF: tuple[object, ...] = (None, False)
_EMPTY: tuple[object, ...] = (None, {})
_AT_VALUES: dict[str, tuple[object, ...]] = {
    "add_cross_attention": _OFF,
    "alibi": _OFF,
    "full_attn_mod": (None, 1),
    "interpolate_factor": (None, 1),
    "is_causal": (True,),  # `transformers` is of two minds about null
    "is_encoder_decoder": _OFF,
    "lm_head_bias": _OFF,
    "per_layer_config": _EMPTY,
    "pruned_heads": _EMPTY,
    "qk_layernorm": _OFF,
    "qk_norm": _OFF,
    "rope_interleaved": _OFF,
    "rope_scaling_factor": (None, 1.0),
    "tie_encoder_decoder": _OFF,
    "use_bidirectional_attention": _OFF,
    "use_dynamic_ntk": _OFF,
    "use_logn_attn": _OFF,
    "use_mrope": _OFF,
    "use_qk_norm": _OFF,
    "quantization_config.transform_config": _EMPTY,
    "quantization_config.kv_cache_scheme.strategy": (None, "tensor", "attn_head"),
}

_NAMES = frozenset(name for names in _OF_ANY_VALUE.values() for name in names)


def is_harmless(path: str, value: Any) -> bool:
    """Returns True if a setting that nobody reads changes no result: it is known as harmless, or it is null.

    path: its name, with the names of the objects that it is in before it, and dots between them.
    """
    if path in _AT_VALUES:
        return value in _AT_VALUES[path]
    return value is None or path in _NAMES


def is_known_to_matter(path: str) -> bool:
    """Returns True for a setting that changes results at other values than those that `is_harmless` takes."""
    return path in _AT_VALUES
