"""Writes a Llama checkpoint of a Hugging Face directory as a BF16 GGUF file, for llama.cpp.

The file holds the checkpoint's own numbers, which are bfloat16: matrices as they are, norms in float32, as llama.cpp
wants them. Rows of Q and K change their order, since llama.cpp's rotary embedding turns neighbouring dimensions of a
head together, and Hugging Face's the two halves of a head. All of that is done on bits, without torch, for which the
client of a load test has no other use. Entries and names: docs/gguf.md of the ggml project.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from numpy.typing import NDArray
from tokenizers import Tokenizer

Bits = NDArray[np.uint16]  # bfloat16, which numpy does not know

_ARCHITECTURE = "LlamaForCausalLM"
_FILE_TYPE_BF16 = 32  # the format's number for a file that is mostly bfloat16
_NAMES = {  # GGUF's names by Hugging Face's; those of a layer without number and ending
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LENGTH = struct.Struct("<Q")
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.weight")


class CheckpointError(Exception):
    """A checkpoint that cannot be written as GGUF; the message is one line."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's shape, as config.json has it."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_length: int
    norm_epsilon: float
    rope_theta: float


def read_shape(checkpoint: Path) -> Shape:
    """Reads config.json. Raises CheckpointError where the model is no plain Llama."""
    config = _read_json(checkpoint / "config.json")
    _refuse_other_models(config, checkpoint)
    try:
        heads = config["num_attention_heads"]
        return Shape(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            max_length=config["max_position_embeddings"],
            norm_epsilon=config["rms_norm_eps"],
            rope_theta=_rope(config).get("rope_theta", config.get("rope_theta", 10_000.0)),
        )
    except KeyError as error:
        raise CheckpointError(f"{checkpoint / 'config.json'} has no {error}") from error


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Writes the checkpoint to `path`. Raises CheckpointError where it holds what is not known here."""
    shape = read_shape(checkpoint)
    writer = GGUFWriter(path, "llama")
    try:
        writer.add_name(checkpoint.name)
        writer.add_file_type(_FILE_TYPE_BF16)
        _add_shape(writer, shape)
        _add_tokenizer(writer, checkpoint, shape.vocabulary)
        for name, tensor in _tensors(checkpoint):
            _add_tensor(writer, name, tensor, shape)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _refuse_other_models(config: dict[str, Any], checkpoint: Path) -> None:
    if config.get("architectures") != [_ARCHITECTURE]:
        raise CheckpointError(f"{checkpoint}: architecture {config.get('architectures')} is not {_ARCHITECTURE}")
    if (kind := _rope(config).get("rope_type", "default")) != "default":
        raise CheckpointError(f"{checkpoint}: rope scaling {kind!r} is not known here")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope


def _add_shape(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(shape.max_length)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)


def _add_tokenizer(writer: GGUFWriter, checkpoint: Path, vocabulary: int) -> None:
    """Adds a byte-level BPE vocabulary, and the ids of the tokens that begin and end a text."""
    path = checkpoint / "tokenizer.json"
    described = _read_json(path)
    if described["model"]["type"] != "BPE":
        raise CheckpointError(f"{path}: a {described['model']['type']} vocabulary is not known here")
    tokenizer = Tokenizer.from_file(str(path))
    tokens, kinds = _vocabulary(tokenizer, vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_words(described["pre_tokenizer"], path))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([_merge(pair) for pair in described["model"]["merges"]])
    config = _read_json(checkpoint / "config.json")
    begin, end = config.get("bos_token_id"), config.get("eos_token_id")
    if isinstance(begin, int):
        writer.add_bos_token_id(begin)
        writer.add_add_bos_token(begin in tokenizer.encode("a").ids)
    if end := [end] if isinstance(end, int) else end:
        writer.add_eos_token_id(end[0])


def _vocabulary(tokenizer: Tokenizer, size: int) -> tuple[list[str], list[int]]:
    """Lists texts and kinds of all tokens; rows of the embedding without a token get a text that is never used."""
    tokens = [f"[PAD{index}]" for index in range(size)]
    kinds = [int(TokenType.UNUSED)] * size
    for text, index in tokenizer.get_vocab(with_added_tokens=True).items():
        tokens[index], kinds[index] = text, int(TokenType.NORMAL)
    for index, added in tokenizer.get_added_tokens_decoder().items():
        kinds[index] = int(TokenType.CONTROL if added.special else TokenType.USER_DEFINED)
    return tokens, kinds


def _words(pre_tokenizer: dict[str, Any], path: Path) -> str:
    """Names the way in which a text is cut into words, as llama.cpp knows it."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    match [step["type"] for step in steps]:
        case ["ByteLevel"] if steps[0].get("use_regex", True):
            return "gpt-2"
        case ["Digits", "ByteLevel"] if steps[0]["individual_digits"] and steps[1].get("use_regex", True):
            return "smollm"
        case kinds:
            raise CheckpointError(f"{path}: words cut by {', '.join(kinds)} are not known here")


def _merge(pair: str | list[str]) -> str:
    return pair if isinstance(pair, str) else " ".join(pair)


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Bits]]:
    """Reads all weights, file by file."""
    paths = sorted(checkpoint.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{checkpoint} has no *.safetensors")
    for path in paths:
        yield from _tensors_of(path)


def _tensors_of(path: Path) -> Iterator[tuple[str, Bits]]:
    """Reads a safetensors file: the length of its header, the header as JSON, the bytes."""
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        header = json.loads(file.read(length))
    content = np.memmap(path, mode="r", offset=_LENGTH.size + length)
    for name, stored in header.items():
        if name == "__metadata__":
            continue
        if stored["dtype"] != "BF16":
            raise CheckpointError(f"{path}: {name} is stored as {stored['dtype']}, which is not known here")
        begin, end = stored["data_offsets"]
        yield name, content[begin:end].view(np.uint16).reshape(stored["shape"])


def _add_tensor(writer: GGUFWriter, name: str, bits: Bits, shape: Shape) -> None:
    """Adds a norm in float32, a matrix in bfloat16."""
    if bits.ndim == 1:
        writer.add_tensor(gguf_name(name), _as_float32(bits))
        return
    packed = np.ascontiguousarray(_interleaved(name, bits, shape)).view(np.uint8)
    writer.add_tensor(gguf_name(name), packed, raw_dtype=GGMLQuantizationType.BF16)


def _as_float32(bits: Bits) -> NDArray[np.float32]:
    """Widens bfloat16 to float32, of which it is the upper half."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _interleaved(name: str, rows: Bits, shape: Shape) -> Bits:
    """Takes rows of Q and K from the two halves of a head by turns."""
    for projection, heads in (("q_proj", shape.heads), ("k_proj", shape.kv_heads)):
        if f".{projection}." in name:
            halves = rows.reshape(heads, 2, shape.head_dim // 2, -1)
            return halves.swapaxes(1, 2).reshape(rows.shape)
    return rows


def gguf_name(name: str) -> str:
    """GGUF's name of a weight. Raises CheckpointError for one that a plain Llama does not have."""
    if (match := _OF_LAYER.fullmatch(name)) and match[2] in _NAMES:
        return f"blk.{match[1]}.{_NAMES[match[2]]}.weight"
    stem = name.removesuffix(".weight")
    if stem == name or stem not in _NAMES:
        raise CheckpointError(f"weight {name} is not known here")
    return f"{_NAMES[stem]}.weight"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return values
