"""A GGUF file's metadata as the values of config.json.

Entries that begin with the architecture's name describe the computation, so an unknown one is refused by name, like a
setting of config.json. Names and meanings: docs/gguf.md of the ggml project.
"""

from typing import Any

from services.protocol.model_files.base import ModelError, Settings, require_float, require_int
from services.protocol.model_files.gguf_header import GgufHeader
from services.protocol.model_files.gguf_tokenizer import TokenKind, special_ids, token_kinds

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Architectures whose files have the rows of Q and K in llama.cpp's order: its rotary embedding rotates neighbouring
# dimensions of a head against each other, Hugging Face's the two halves of a head.
INTERLEAVED_ROTARY = frozenset({"LlamaForCausalLM"})

_INTEGERS = {  # config.json's name: the entry, without the architecture's name
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
_KV_HEADS, _KEY_LENGTH, _VALUE_LENGTH = "attention.head_count_kv", "attention.key_length", "attention.value_length"
_ROTARY_LENGTH, _THETA, _NORM = "rope.dimension_count", "rope.freq_base", "attention.layer_norm_rms_epsilon"
_SCALING = "rope.scaling.type"
# For each kind of rope scaling: config.json's names, and the entries.
_SCALINGS = {
    "none": {},
    "linear": {"factor": "rope.scaling.factor"},
    "yarn": {
        "factor": "rope.scaling.factor",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    },
}
_ONLY = {  # entries that are supported with one value alone, which is also their default
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "attention.sliding_window": 0,
    "attention.scale": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scale_linear": 1.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "tensor_data_layout": "Meta AI original pth",  # llama.cpp's order of Q and K, under its old name
}
# Entries without effect: the embedding's shape gives the number of tokens, and these models' norms are RMSNorm.
_NOT_READ = frozenset({"vocab_size", "rope.scaling.finetuned", "attention.layer_norm_epsilon"})
_SAMPLING = {"temp": "temperature"}  # names below general.sampling that generation_config.json spells otherwise

# Control tokens that end an answer or a turn, as in llama.cpp: a file names at most one of them by its id.
_END_TEXTS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"}
)


def read_gguf_config(header: GgufHeader, rotary_factors: tuple[float, ...] | None) -> Settings:
    """Makes the values of config.json for this file.

    rotary_factors: the values of `rope_freqs.weight`, if it is there. Raises ModelError for any entry that is missing
    or not supported.
    """
    where, metadata = header.path.name, header.metadata
    if (parts := metadata.get("split.count", 1)) != 1:
        raise ModelError(f"{where} is one of {parts} parts: join them first (llama-gguf-split --merge)")
    if (kind := metadata.get("general.type", "model")) != "model":
        raise ModelError(f"{where}: general.type {kind!r} is not supported (only 'model')")
    name = header.text("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{where}: architecture {name!r} is not supported in GGUF files (supported: {known})")
    values = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    _check_known(values, where, name)
    if require_int(values, "block_count", where) > len(header.tensors):
        raise ModelError(f"{where}: {values['block_count']} blocks cannot be of {len(header.tensors)} tensors")
    heads = require_int(values, "attention.head_count", where)
    head_dim = require_int({_KEY_LENGTH: _hidden(values, where) // heads} | values, _KEY_LENGTH, where)
    for key in (_VALUE_LENGTH, _ROTARY_LENGTH):
        if values.get(key, head_dim) != head_dim:
            raise ModelError(f"{where}: {name}.{key} {values[key]!r} is not supported beside heads of {head_dim}")
    return {
        "architectures": [_ARCHITECTURES[name]],
        "dtype": "bfloat16",  # quantized values have no dtype of their own
        "vocab_size": _vocab_size(header),
        **{ours: require_int(values, theirs, where) for ours, theirs in _INTEGERS.items()},
        "num_key_value_heads": require_int({_KV_HEADS: heads} | values, _KV_HEADS, where),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": require_float(values, _NORM, where),
        "rope_parameters": _rope(values, where, rotary_factors),
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": _end_ids(header),
    }


def read_gguf_generation_config(metadata: dict[str, Any]) -> Settings:
    """Makes the values of generation_config.json. Sampling options that it has no name for keep the file's names."""
    start = "general.sampling."
    found = {key.removeprefix(start): value for key, value in metadata.items() if key.startswith(start)}
    return {_SAMPLING.get(name, name): value for name, value in found.items()}


def _check_known(values: Settings, where: str, architecture: str) -> None:
    kind = values.get(_SCALING, "none")
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ModelError(f"{where}: rope scaling {kind!r} is not supported (supported: {', '.join(_SCALINGS)})")
    known = {*_INTEGERS.values(), _KV_HEADS, _KEY_LENGTH, _VALUE_LENGTH, _ROTARY_LENGTH, _THETA, _NORM, _SCALING}
    known |= _NOT_READ | set(_SCALINGS[kind].values())
    for key, value in values.items():
        if key not in known and (key not in _ONLY or value != _ONLY[key]):
            raise ModelError(f"{where}: {architecture}.{key} {value!r} is not supported")


def _hidden(values: Settings, where: str) -> int:
    return require_int(values, "embedding_length", where)


def _vocab_size(header: GgufHeader) -> int:
    """Returns the rows of the embedding: more than there are tokens if it is padded."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.path.name}: there is no matrix token_embd.weight")
    return embedding.shape[0]


def _rope(values: Settings, where: str, rotary_factors: tuple[float, ...] | None) -> Settings:
    theta = require_float(values, _THETA, where, 10_000.0)
    kind = values.get(_SCALING, "none")
    if rotary_factors is not None:
        if kind != "none":
            raise ModelError(f"{where}: rope_freqs.weight beside rope scaling {kind!r} is not supported")
        return {"rope_type": "frequency_factors", "rope_theta": theta, "factors": rotary_factors}
    parameters = {ours: values[theirs] for ours, theirs in _SCALINGS[kind].items() if theirs in values}
    return {"rope_type": "default" if kind == "none" else kind, "rope_theta": theta, **parameters}


def _end_ids(header: GgufHeader) -> list[int]:
    """Returns tokens that end an answer: those that the file names by id, and those that are known by their texts."""
    metadata = header.metadata
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))
    found = [special_ids(header).get("eos_token"), *named]
    found += header.items("tokenizer.ggml.eos_token_ids", int) if "tokenizer.ggml.eos_token_ids" in metadata else []
    tokens = header.items("tokenizer.ggml.tokens", str)
    kinds = zip(tokens, token_kinds(header), strict=True)
    found += [id for id, (token, kind) in enumerate(kinds) if kind == TokenKind.CONTROL and token in _END_TEXTS]
    known = [token for token in found if isinstance(token, int) and 0 <= token < len(tokens)]
    return list(dict.fromkeys(known))
