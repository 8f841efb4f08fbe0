"""Weights as a GGUF file stores them: their names in Hugging Face's words, their bytes, and kinds of quantization."""

import math
import re
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from services.engine.models.weight_files import WeightFile
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.gguf_file import ROTARY_FACTORS
from services.protocol.model_files.gguf_header import GgufHeader, GgufTensor, read_gguf_header

_NAMES = {  # Hugging Face's names by GGUF's; names in a layer are without its number and their ending
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_LAYER_OF_HUGGING_FACE = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)")
_FLOATING = {"F32", "F16", "BF16"}
# fmt: off
QUANTIZED = {
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
}
# fmt: on


class GgufStored:
    """One tensor in the file: its bytes, and the shape of its numbers. Raises ModelError."""

    def __init__(self, name: str, tensor: GgufTensor, path: Path) -> None:
        self.name = name  # GGUF's
        self.quantization = _quantization(name, tensor, path)
        self.shape = tensor.shape
        self.row_length = tensor.shape[-1] if tensor.shape else 1
        self.num_rows = math.prod(tensor.shape[:-1])
        self.per_block, self.block_bytes = GGML_QUANT_SIZES[self.quantization]  # numbers and bytes of a row's blocks
        if self.row_length == 0 or self.row_length % self.per_block:
            raise ModelError(
                f"{path.name}: rows of {self.row_length} numbers in tensor {name} are no {self.quantization.name}"
            )
        self.start = tensor.offset
        self.end = self.start + self.num_rows * (self.row_length // self.per_block) * self.block_bytes


def gguf_weights(path: Path) -> WeightFile:
    """Returns the file, for `weights_id`. Raises ModelError."""
    header = read_gguf_header(path)
    extents = [(stored.start, stored.end) for _, stored in sorted(read_stored(header).items())]
    with path.open("rb") as file:
        return WeightFile(path, file.read(header.data_start), extents)


def read_stored(header: GgufHeader) -> dict[str, GgufStored]:
    """Returns the file's weights, by Hugging Face's names. Raises ModelError."""
    path, found = header.path, dict[str, GgufStored]()
    for name, tensor in header.tensors.items():
        if name == ROTARY_FACTORS:
            continue
        stored = GgufStored(name, tensor, path)
        if (other := found.setdefault(_name(name), stored)) is not stored:
            raise ModelError(f"{path.name}: tensors {other.name} and {name} are the same weight")
    last, size = max((stored.end for stored in found.values()), default=0), path.stat().st_size
    if last > size:
        raise ModelError(f"{path} is truncated: its tensors end at byte {last}, the file at {size}")
    return found


def _name(name: str) -> str:
    """Returns Hugging Face's name of a tensor. An unknown tensor keeps its own name, which the model refuses."""
    if (match := _OF_LAYER.fullmatch(name)) and match[2] in _NAMES:
        return f"model.layers.{match[1]}.{_NAMES[match[2]]}.{match[3]}"
    return _NAMES.get(name, name)


def gguf_name(name: str) -> str:
    """Returns GGUF's name of the weight with this Hugging Face name."""
    theirs = {ours: name for name, ours in _NAMES.items()}
    if match := _LAYER_OF_HUGGING_FACE.fullmatch(name):
        return f"blk.{match[1]}.{theirs[match[2]]}.{match[3]}"
    return theirs[name]


def _quantization(name: str, tensor: GgufTensor, path: Path) -> GGMLQuantizationType:
    known = _FLOATING | QUANTIZED
    try:
        found = GGMLQuantizationType(tensor.ggml_type)
    except ValueError:
        found = None
    if found is None or found.name not in known:
        stored = f"type {tensor.ggml_type}" if found is None else found.name
        raise ModelError(f"{path.name}: tensor {name} is stored as {stored}, which is not supported")
    return found
