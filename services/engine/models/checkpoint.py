"""Safetensors files of a model directory: the file of each tensor, and the identity of the weights.

Every defect of the files (missing shard or tensor, wrong shape, truncated, not safetensors) raises a ModelError that
names file and tensor. Pickled weights are never opened.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from services.engine.models.base import ModelConfig
from services.protocol.model_files.base import ModelError, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_FLOATING = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PREFIX = "model."
_SAMPLE_BYTES = 1024  # bytes of each tensor that `weights_id` reads
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
        if stored not in _FLOATING:
            raise ModelError(f"{self._homes[name]}: tensor {name} is stored as {stored}, which is not supported")
        return _FLOATING[stored]

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelError unless the tensor is there with this shape and a floating-point dtype."""
        found = tuple(self._slice(name).get_shape())
        if found != shape:
            raise ModelError(
                f"{self._homes[name]}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}"
            )
        self.dtype(name)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor, cast. On the CPU it may be a view of the mapped file: copy it to keep it."""
        try:
            tensor: torch.Tensor = self._handles[self._homes[name]].get_tensor(self._stored(name))
        except SafetensorError as error:
            raise ModelError(f"{self._homes[name]}: tensor {name} cannot be read: {error}") from error
        return tensor.to(dtype)

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


def safetensors_files(directory: Path) -> list[Path]:
    """Returns the weight files of a directory, sorted by name. Raises ModelError if there are none or one
    is missing.
    """
    index = directory / INDEX_FILE
    if index.is_file():
        shards = read_json_object(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{index} has no weight_map")
        paths = [directory / name for name in sorted(set(shards.values()))]
        missing = next((path.name for path in paths if not path.is_file()), None)
        if missing:
            raise ModelError(f"{directory}: weight file {missing}, named by {INDEX_FILE}, is missing")
        return paths
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if any(directory.glob("pytorch_model*.bin")):
        raise ModelError(f"{directory} has its weights only in pytorch_model*.bin (pickle): only safetensors are read")
    raise ModelError(f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file with weights."""

    path: Path
    header: bytes  # names, dtypes, shapes, offsets
    extents: list[tuple[int, int]]  # first byte and end of each tensor, from the start of the file


def weights_id(files: Iterable[WeightFile], config: ModelConfig) -> str:
    """Returns a digest (32 hex digits) that tells weights apart without reading them whole.

    It covers the model's shape, the headers of all files and 1 KiB from the middle of every tensor. Two fine-tunes of
    equal shape have different digests, since training changes tensors all over; a change of a few values elsewhere in a
    tensor is not seen. The same weights cut into other shards have another digest. Raises ModelError.
    """
    digest = blake2b(digest_size=16)
    digest.update(json.dumps(asdict(config), sort_keys=True).encode())
    for weights in files:
        digest.update(weights.header)
        with weights.path.open("rb") as file:
            for begin, end in weights.extents:
                size = min(_SAMPLE_BYTES, end - begin)
                digest.update(os.pread(file.fileno(), size, (begin + end - size) // 2))
    return digest.hexdigest()


def safetensors_weights(directory: Path) -> Iterator[WeightFile]:
    """Yields the weight files of a Hugging Face directory. Raises ModelError."""
    for path in safetensors_files(directory):
        with path.open("rb") as file:
            header = _read_header(path, file.read(8), file.fileno())
        start = 8 + len(header)
        yield WeightFile(path, header, [(start + begin, start + end) for begin, end in _extents(path, header)])


def _open_file(path: Path, device: str) -> Any:
    try:
        return safe_open(path, framework="pt", device=device)
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _read_header(path: Path, prefix: bytes, descriptor: int) -> bytes:
    """Returns the JSON header of a safetensors file, whose first 8 bytes are its length (little-endian)."""
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
    if length is None or length > os.fstat(descriptor).st_size - 8:
        raise _unreadable(path, "its header is incomplete")
    return os.pread(descriptor, length, 8)


def _extents(path: Path, header: bytes) -> list[tuple[int, int]]:
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        return [tuple(tensors[name]["data_offsets"]) for name in sorted(tensors)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, reason: object) -> ModelError:
    return ModelError(f"weight file {path} is truncated or not a safetensors file: {reason}")
