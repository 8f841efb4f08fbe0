"""Tensors of a GGUF file, dequantized when they are read, with the names and the order of Hugging Face."""

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from gguf import dequantize
from torch import Tensor

from services.engine.models.gguf_stored import GgufStored, gguf_name, read_stored
from services.engine.models.model_config import ModelConfig
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.gguf_config import INTERLEAVED_ROTARY
from services.protocol.model_files.gguf_header import read_gguf_header

_FLOATING = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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
        self._stored = read_stored(read_gguf_header(path))
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

    def _find(self, name: str) -> GgufStored:
        if name not in self._stored:
            raise ModelError(f"tensor {gguf_name(name)} is missing from {self._path.name}")
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
