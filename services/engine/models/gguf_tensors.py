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
from services.engine.models.tensor_source import index_of
from services.engine.quantization.codes import CodedMatrix
from services.engine.quantization.gguf_blocks import coded_blocks
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

    def read(self, name: str, dtype: torch.dtype, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """See `TensorSource.read`. Dequantizes in float32 and casts, some rows at a time.

        What is read is a little more than what is asked for: the quantization's blocks around these columns, and heads
        around these rows if the file has a head's rows in another order.
        """
        stored, index = self._find(name), index_of(rows, columns)
        if rows is None and columns is None:
            numbers = self._numbers(stored, range(stored.num_rows), range(stored.row_length), dtype)
            return self._in_halves(name, numbers.reshape(stored.shape))
        own, *across = (range(length)[part] for length, part in zip(stored.shape, index, strict=False))
        heads = self._around_heads(name, own)
        if len(stored.shape) == 1:  # one row of the file
            numbers = self._numbers(stored, range(1), heads, dtype)[0]
        else:
            numbers = self._numbers(stored, heads, across[0] if across else range(stored.row_length), dtype)
        ordered = self._in_halves(name, numbers)
        return ordered if heads == own else ordered[own.start - heads.start : own.stop - heads.start].clone()

    def coded(self, name: str, rows: slice | None = None, columns: slice | None = None) -> CodedMatrix | None:
        """See `TensorSource.coded`. Columns are of whole blocks."""
        stored = self._find(name)
        if len(stored.shape) != 2:
            return None
        own, across = (range(n)[part or slice(None)] for n, part in zip(stored.shape, (rows, columns), strict=True))
        if not own or not across or across != _around(across, stored.per_block):
            return None
        heads = self._around_heads(name, own)
        blocks = self._packed(stored, heads, across).reshape(
            len(heads), len(across) // stored.per_block, stored.block_bytes
        )
        if (matrix := coded_blocks(stored.quantization, blocks)) is None:
            return None
        ordered = matrix.by_rows(lambda rows: self._in_halves(name, rows))
        return ordered.rows(own.start - heads.start, own.stop - heads.start).to(self._device)

    def _around_heads(self, name: str, rows: range) -> range:
        """Returns the rows to read for these: those of whole heads if the file has a head's rows in another order."""
        return _around(rows, self._config.head_dim) if self._is_interleaved(name) else rows

    def _packed(self, stored: GgufStored, rows: range, columns: range) -> np.ndarray:
        """Returns the bytes of these rows, which may lie apart, and of these columns, which are whole blocks."""
        begin, end = (place // stored.per_block * stored.block_bytes for place in (columns.start, columns.stop))
        packed: np.ndarray = self._content[stored.start : stored.end].reshape(stored.num_rows, -1)
        return packed[rows.start : rows.stop, begin:end]

    def _numbers(self, stored: GgufStored, rows: range, columns: range, dtype: torch.dtype) -> Tensor:
        """Returns numbers in the file's order, [rows, columns]."""
        numbers = torch.empty((len(rows), len(columns)), dtype=dtype, device=self._device)
        if not columns:
            return numbers
        blocks = _around(columns, stored.per_block)
        packed = self._packed(stored, rows, blocks)
        step = max(1, _NUMBERS_AT_ONCE // len(blocks))
        for first in range(0, len(rows), step):
            found = dequantize(np.ascontiguousarray(packed[first : first + step]), stored.quantization)
            around = torch.from_numpy(np.require(found, requirements=["C", "W"]))
            numbers[first : first + step] = around[:, columns.start - blocks.start : columns.stop - blocks.start]
        return numbers

    def _find(self, name: str) -> GgufStored:
        if name not in self._stored:
            raise ModelError(f"tensor {gguf_name(name)} is missing from {self._path.name}")
        return self._stored[name]

    def _is_interleaved(self, name: str) -> bool:
        """Returns True for Q and K whose heads have the numbers of their two halves by turns."""
        turned = (".q_proj.", ".k_proj.")
        return self._config.architecture in INTERLEAVED_ROTARY and any(projection in name for projection in turned)

    def _in_halves(self, name: str, rows: Tensor) -> Tensor:
        """Reorders rows of Q and K, which are those of whole heads, so that a head's halves are rotated against each
        other.
        """
        if not self._is_interleaved(name):
            return rows
        head_dim = self._config.head_dim
        pairs = rows.reshape(len(rows) // head_dim, head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).flatten(0, 2)


def _around(places: range, step: int) -> range:
    """Returns the smallest range that has these places, and begins and ends at multiples of `step`."""
    return range(places.start // step * step, -(-places.stop // step) * step)
