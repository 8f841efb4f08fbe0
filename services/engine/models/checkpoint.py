"""Tensors of the safetensors files of a model directory.

Every defect of the files (missing shard or tensor, wrong shape, truncated, not safetensors) raises a ModelError that
names file and tensor. Pickled weights are never opened.
"""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from services.engine.models.tensor_source import index_of
from services.engine.models.weight_files import FLOATING, safetensors_files, unreadable
from services.engine.quantization.codes import CodedMatrix
from services.protocol.model_files.base import ModelError

_PREFIX = "model."
_CPU = torch.device("cpu")


class Checkpoint:
    """The open safetensors files of one directory, read to a device. Use as a context manager; tensors outlive it.

    The tensors of a model that was saved without its head lack the prefix "model." in their names; here all have it.
    """

    def __init__(self, directory: Path, device: torch.device = _CPU) -> None:
        self.lends = device.type == "cpu"  # on the CPU safetensors maps files; for other devices it copies
        self._device = str(device)
        self._files = ExitStack()
        self._handles: dict[str, Any] = {}
        self._homes: dict[str, str] = {}  # tensor -> name of its file
        self._has_prefix = True
        try:
            self._open(directory)
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    @property
    def names(self) -> frozenset[str]:
        """Returns the names of all tensors of the checkpoint."""
        return frozenset(self._homes)

    def home(self, name: str) -> str:
        """Returns the name of the file that holds a tensor."""
        return self._homes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Returns the stored dtype of a tensor. Raises ModelError if it is missing or not of a floating-point dtype."""
        stored = self._slice(name).get_dtype()
        if stored not in FLOATING:
            raise ModelError(f"{self._homes[name]}: tensor {name} is stored as {stored}, which is not supported")
        dtype: torch.dtype = getattr(torch, FLOATING[stored])
        return dtype

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelError unless the tensor is there with this shape and a floating-point dtype."""
        found = tuple(self._slice(name).get_shape())
        if found != shape:
            raise ModelError(
                f"{self._homes[name]}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}"
            )
        self.dtype(name)

    def stored(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Returns the dtype of a tensor, by safetensors' name, and its shape. Raises ModelError if it is missing."""
        found = self._slice(name)
        return found.get_dtype(), tuple(found.get_shape())

    def read(
        self, name: str, dtype: torch.dtype, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """See `TensorSource.read`. On the CPU it may be a view of the mapped file: copy it to keep it."""
        return self.raw(name, rows, columns).to(dtype)

    def raw(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Returns tensor[rows, columns] as it is stored, of any dtype. On the CPU it may be a view of the mapped file.
        Raises ModelError.
        """
        tensor: torch.Tensor
        try:
            if rows is None and columns is None:
                tensor = self._handles[self._homes[name]].get_tensor(self._stored(name))
            else:
                tensor = self._slice(name)[index_of(rows, columns)]
        except SafetensorError as error:
            raise ModelError(f"{self._homes[name]}: tensor {name} cannot be read: {error}") from error
        return tensor

    def coded(self, name: str, rows: slice | None = None, columns: slice | None = None) -> CodedMatrix | None:
        """Returns None: safetensors have numbers."""
        return None

    def _slice(self, name: str) -> Any:
        if name not in self._homes:
            raise ModelError(f"tensor {name} is missing from the checkpoint ({', '.join(sorted(self._handles))})")
        return self._handles[self._homes[name]].get_slice(self._stored(name))

    def _stored(self, name: str) -> str:
        return name if self._has_prefix else name.removeprefix(_PREFIX)

    def _open(self, directory: Path) -> None:
        for path in safetensors_files(directory):
            self._handles[path.name] = handle = self._files.enter_context(_open_file(path, self._device))
            for name in handle.keys():  # noqa: SIM118 -- not a mapping
                if name in self._homes:
                    raise ModelError(f"tensor {name} is in two files, {self._homes[name]} and {path.name}")
                self._homes[name] = path.name
        if not any(name.startswith(_PREFIX) for name in self._homes):
            self._has_prefix = False
            self._homes = {_with_prefix(name): home for name, home in self._homes.items()}


def _with_prefix(name: str) -> str:
    return name if name.startswith("lm_head.") else _PREFIX + name


def _open_file(path: Path, device: str) -> Any:
    try:
        return safe_open(path, framework="pt", device=device)
    except (SafetensorError, OSError) as error:
        raise unreadable(path, error) from error
