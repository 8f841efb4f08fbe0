"""Writes small GGUF files with the `gguf` package, as llama.cpp's converter would make them of a checkpoint."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType
from safetensors.numpy import load_file

from services.protocol.model_files.base import read_json_object

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def write_gguf(
    path: Path,
    checkpoint: Path,
    stored: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    others: Mapping[str, GGMLQuantizationType] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    rotary_factors: list[float] | None = None,
    change: Mapping[str, Any] | None = None,
    more_tensors: Mapping[str, tuple[int, ...]] | None = None,
    left_out: str | None = None,
) -> Path:
    """A checkpoint of one safetensors file as a GGUF file, its matrices quantized.

    others: how matrices with these parts of GGUF's names are stored instead.
    tokenizer: entries below `tokenizer.`; None: a byte-level one as wide as the embedding. change: entries to write
    beside or instead of the usual ones; None removes one. more_tensors: names and shapes. left_out: a tensor's name.
    """
    config = read_json_object(checkpoint / "config.json")
    name = ARCHITECTURES[config["architectures"][0]]
    entries = {
        **_shape(name, config),
        **{f"tokenizer.{key}": value for key, value in (tokenizer or plain_tokens(config["vocab_size"])).items()},
        **(change or {}),
    }
    writer = gguf.GGUFWriter(path, entries.pop("general.architecture", name))
    for key, value in entries.items():
        _add(writer, key, value)
    if rotary_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rotary_factors, dtype=np.float32))
    for name_of_more, shape in (more_tensors or {}).items():
        writer.add_tensor(name_of_more, np.ones(shape, dtype=np.float32))
    for tensor, values in load_file(checkpoint / "model.safetensors").items():
        if _name(tensor) == left_out:
            continue
        own = next((kind for part, kind in (others or {}).items() if part in _name(tensor)), stored)
        packed, kind = _packed(_interleaved(tensor, values, name, config), own)
        writer.add_tensor(_name(tensor), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain_tokens(vocab_size: int) -> dict[str, Any]:
    """A byte-level vocabulary without merges: the bytes, then tokens that stand for nothing."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    bytes_ = ["<|bos|>", "<|eos|>", *bytes_to_unicode().values()]
    tokens = bytes_ + [f"[PAD{index}]" for index in range(len(bytes_), vocab_size)]
    kinds = [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * 256 + [TokenType.UNUSED] * (vocab_size - len(bytes_))
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": tokens,
        "ggml.token_type": [int(kind) for kind in kinds],
        "ggml.merges": ["Ġ Ġ"],  # the format knows no empty list; this one leads to no token
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 1,
    }


def random_blocks(kind: GGMLQuantizationType, shape: tuple[int, int], seed: int) -> np.ndarray:
    """uint8[rows, bytes] of a type that only llama.cpp can quantize to: random bits whose values a weight may have.

    Blocks with other values are drawn again: their scales are random bits too.
    """
    rows, length = shape
    per_block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = np.zeros((rows * length // per_block, num_bytes), dtype=np.uint8)
    missing = np.arange(len(blocks))
    with np.errstate(all="ignore"):
        while len(missing):
            blocks[missing] = random.integers(0, 256, (len(missing), num_bytes), dtype=np.uint8)
            sizes = np.sqrt((gguf.dequantize(blocks[missing], kind).astype(np.float64) ** 2).mean(axis=1))
            missing = missing[~((sizes > 0.02) & (sizes < 0.3))]
    return blocks.reshape(rows, -1)


def _shape(name: str, config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters", {})
    entries = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if "head_dim" in config:
        entries |= dict.fromkeys(("attention.key_length", "attention.value_length"), config["head_dim"])
    if rope.get("rope_type") in ("yarn", "linear"):
        entries |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        entries["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return {f"{name}.{key}": value for key, value in entries.items()}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    kinds: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    add: Callable[[str, Any], None] = kinds.get(type(value), writer.add_array)
    add(key, value)


def _name(tensor: str) -> str:
    stem, _, kind = tensor.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def _interleaved(tensor: str, values: np.ndarray, name: str, config: dict[str, Any]) -> np.ndarray:
    """Rows of Llama's Q and K in llama.cpp's order: the two halves of a head by turns."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(
        tensor.split(".")[-2]
    )
    if name != "llama" or heads is None:
        return values
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _packed(values: np.ndarray, kind: GGMLQuantizationType) -> tuple[np.ndarray, GGMLQuantizationType]:
    """A matrix as `kind`, everything else as it is."""
    values = values.astype(np.float32)
    if values.ndim == 1:
        return values, GGMLQuantizationType.F32
    try:
        return gguf.quantize(values, kind), kind
    except NotImplementedError:
        return random_blocks(kind, values.shape, int(np.abs(values).sum())), kind
