"""Writes tiny random checkpoints in Hugging Face format, for tests that need real weights.

Weights are scaled so that greedy decoding wanders: 64 greedy tokens hold at least 10 distinct ids.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

FAMILIES = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "ministral": (MinistralConfig, MinistralForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "opt": (OPTConfig, OPTForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {"num_local_experts": 9, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    },
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
}
ENCODERS = {
    "bert": (BertConfig, BertModel),
    "modernbert": (ModernBertConfig, ModernBertModel),
    "roberta": (RobertaConfig, RobertaModel),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel),
}
SCORERS = {
    "llama-scorer": (LlamaConfig, LlamaForSequenceClassification),
    "qwen2-scorer": (Qwen2Config, Qwen2ForSequenceClassification),
    "qwen3-scorer": (Qwen3Config, Qwen3ForSequenceClassification),
}
CROSS_ENCODERS = {
    "bert-classifier": (BertConfig, BertForSequenceClassification),
    "modernbert-classifier": (ModernBertConfig, ModernBertForSequenceClassification),
    "roberta-classifier": (RobertaConfig, RobertaForSequenceClassification),
    "xlm-roberta-classifier": (XLMRobertaConfig, XLMRobertaForSequenceClassification),
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


def long_rope(context: int, size: int) -> dict[str, Any]:
    """Settings of a rope with lists of so many factors, for sequences within the context and for longer ones."""
    short, long = ([1 + step * index for index in range(size)] for step in (0.1, 0.7))
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long}
    return {"original_max_position_embeddings": context, "rope_parameters": rope}


def write_checkpoint(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **config: Any,
) -> Path:
    """Writes a checkpoint with random weights and returns its directory. `config` overrides the tiny defaults."""
    config_class, model_class = (FAMILIES | ENCODERS | CROSS_ENCODERS | SCORERS)[family]
    shape: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    if family == "opt":
        shape |= {"ffn_dim": 96, "pad_token_id": None}
    elif family in ENCODERS | CROSS_ENCODERS:
        shape |= {"intermediate_size": 96, "pad_token_id": 1, "eos_token_id": 2}
    else:
        shape |= {"intermediate_size": 96, "num_key_value_heads": 2}
    if family in CROSS_ENCODERS | SCORERS:
        shape["num_labels"] = 1
    if family in ("gemma2", "gemma3", "gpt_oss", "llama", "ministral", "mistral", "mixtral", "qwen3", "qwen3-scorer"):
        shape["head_dim"] = 16
    if family in ("deepseek_v2", "deepseek_v3"):
        shape |= LATENT
    shape |= OF_EXPERTS.get(family, {})
    if family in ("phi3", "smollm3"):  # their own are tokens that are not there
        shape["pad_token_id"] = None
    model = model_class(config_class(**shape | config))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        _randomize(name, parameter.data, generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            _randomize(name, buffer, generator)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def edit_json(path: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    """Changes keys of a JSON file."""
    values = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in values.items() if key not in drop} | changes))


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a safetensors file."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _randomize(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Norms near one, biases that matter, and matrices large enough for attention to choose sharply."""
    noise = torch.randn(parameter.shape, generator=generator)
    if name.endswith("bias"):
        parameter.copy_(0.3 * noise)
    elif "norm" in name.lower():
        parameter.copy_(1 + 0.2 * noise)
    elif "embed_positions" in name or name.endswith("sinks"):
        parameter.copy_(noise)
    elif "embed_tokens" in name or "lm_head" in name:
        # Small beside what the layers add: a tied head would else repeat the last token for ever.
        parameter.copy_(0.1 * noise)
    else:
        parameter.copy_(2.5 * noise / parameter.shape[-1] ** 0.5)


def plant(directory: Path, tensor: str, row: int, value: float) -> Path:
    """Overwrites one row of a tensor in a checkpoint of one file; returns the directory."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor][row] = value
    save_tensors(path, tensors)
    return directory
