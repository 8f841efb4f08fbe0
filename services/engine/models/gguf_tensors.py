"""Tensors of a GGUF file, dequantized when they are read, with the names and the order of Hugging Face."""

import math
import re
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from services.engine.models.base import ModelConfig
from services.engine.models.checkpoint import WeightFile
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.gguf_config import INTERLEAVED_ROTARY
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
_FLOATING = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# fmt: off
QUANTIZED = {
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
}
# fmt: on
_NUMBERS_AT_ONCE = 1 << 20  # dequantized at once; so few stay in the processor's caches until they are cast
_CPU = torch.device("cpu")


class GgufTensors:
    """The weights of one GGUF file, as a `TensorSource`. Use as a context manager; tensors outlive it."""

    lends = False

    def __init__(self, path: Path, config: ModelConfig, device: torch.device = _CPU) -> None:
        """Raises ModelError if the file is too short, or a tensor is stored in an unknown way."""
        self._path = path
        self._config = config
        self._device = device
        self._stored = _read_stored(read_gguf_header(path))
        self._content = np.memmap(path, mode="r")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._content

    @property
    def names(self) -> frozenset[str]:
        """Returns the names of all weights of the file."""
        return frozenset(self._stored)

    def home(self, name: str) -> str:
        """Returns the file's name."""
        return self._path.name

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of the stored numbers; for quantized tensors float32, the dtype of their dequantized
        numbers.
        """
        return _FLOATING.get(self._find(name).quantization.name, torch.float32)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelError unless the tensor is there with this shape."""
        if (found := self._find(name).shape) != shape:
            theirs = self._stored[name].name
            raise ModelError(
                f"{self._path.name}: tensor {theirs} has shape {list(found)}, the metadata asks for {list(shape)}"
            )

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns a tensor, dequantized in float32 and cast, some rows at a time."""
        stored = self._find(name)
        packed = self._content[stored.start : stored.end].reshape(stored.num_rows, -1)
        rows = torch.empty((stored.num_rows, stored.row_length), dtype=dtype, device=self._device)
        step = max(1, _NUMBERS_AT_ONCE // stored.row_length)
        for first in range(0, stored.num_rows, step):
            numbers = dequantize(np.ascontiguousarray(packed[first : first + step]), stored.quantization)
            rows[first : first + step] = torch.from_numpy(np.require(numbers, requirements=["C", "W"]))
        return self._in_halves(name, rows).reshape(stored.shape)

    def _find(self, name: str) -> "_Stored":
        if name not in self._stored:
            raise ModelError(f"tensor {_gguf_name(name)} is missing from {self._path.name}")
        return self._stored[name]

    def _in_halves(self, name: str, rows: Tensor) -> Tensor:
        """Reorders rows of Q and K so that a head's halves are rotated against each other."""
        config = self._config
        if config.architecture not in INTERLEAVED_ROTARY:
            return rows
        for projection, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            if f".{projection}." in name:
                return rows.reshape(heads, config.head_dim // 2, 2, -1).transpose(1, 2)
        return rows


class _Stored:
    """One tensor in the file: its bytes, and the shape of its numbers. Raises ModelError."""

    def __init__(self, name: str, tensor: GgufTensor, path: Path) -> None:
        self.name = name  # GGUF's
        self.quantization = _quantization(name, tensor, path)
        self.shape = tensor.shape
        self.row_length = tensor.shape[-1] if tensor.shape else 1
        self.num_rows = math.prod(tensor.shape[:-1])
        per_block, block_bytes = GGML_QUANT_SIZES[self.quantization]
        if self.row_length == 0 or self.row_length % per_block:
            raise ModelError(
                f"{path.name}: rows of {self.row_length} numbers in tensor {name} are no {self.quantization.name}"
            )
        self.start = tensor.offset
        self.end = self.start + self.num_rows * (self.row_length // per_block) * block_bytes


def gguf_weights(path: Path) -> WeightFile:
    """Returns the file, for `weights_id`. Raises ModelError."""
    header = read_gguf_header(path)
    extents = [(stored.start, stored.end) for _, stored in sorted(_read_stored(header).items())]
    with path.open("rb") as file:
        return WeightFile(path, file.read(header.data_start), extents)


def _read_stored(header: GgufHeader) -> dict[str, _Stored]:
    """Returns the file's weights, by Hugging Face's names. Raises ModelError."""
    path, found = header.path, dict[str, _Stored]()
    for name, tensor in header.tensors.items():
        if name == ROTARY_FACTORS:
            continue
        stored = _Stored(name, tensor, path)
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


def _gguf_name(name: str) -> str:
    """Returns GGUF's name of the weight with this Hugging Face name."""
    theirs = {ours: name for name, ours in _NAMES.items()}
    if match := _LAYER_OF_HUGGING_FACE.fullmatch(name):
        return f"blk.{match[1]}.{theirs[match[2]]}.{match[3]}"
    return theirs[name]


def _quantization(name: str, tensor: GgufTensor, path: Path) -> GGMLQuantizationType:
    known = _FLOATING.keys() | QUANTIZED
    try:
        found = GGMLQuantizationType(tensor.ggml_type)
    except ValueError:
        found = None
    if found is None or found.name not in known:
        stored = f"type {tensor.ggml_type}" if found is None else found.name
        raise ModelError(f"{path.name}: tensor {name} is stored as {stored}, which is not supported")
    return found
