"""Files with weights: which there are, their headers, and the identity of the weights.

Every defect of the files raises a ModelError that names the file. Pickled weights are never opened.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from services.engine.models.model_config import ModelConfig, described
from services.protocol.model_files.base import ModelError, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

FLOATING = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # names of dtypes, by those in the files

_SAMPLE_BYTES = 1024  # bytes of each tensor that `weights_id` reads


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
    tensor is not seen. The same weights in other files have another digest. The ranks of a model have the
    digest of the whole. Raises ModelError.
    """
    digest = blake2b(digest_size=16)
    digest.update(json.dumps(described(config), sort_keys=True).encode())
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


def check_complete(file: WeightFile) -> None:
    """Raises ModelError for a file that ends before its tensors do, as after a download that broke off."""
    last, size = max((end for _, end in file.extents), default=0), file.path.stat().st_size
    if last > size:
        raise unreadable(file.path, f"its tensors end at byte {last}, the file at {size}")


def stored_dtype(directory: Path) -> str:
    """Returns the name of the dtype in which the first file has most tensors, codes and scales of quantized layers
    aside where that can be. Raises ModelError.
    """
    file = next(safetensors_weights(directory))
    kinds = [str(entry.get("dtype")) for name, entry in json.loads(file.header).items() if name != "__metadata__"]
    kinds = [kind for kind in kinds if kind in FLOATING] or kinds
    stored = max(set(kinds), key=kinds.count, default="")
    if stored not in FLOATING:
        raise ModelError(f"{file.path.name}: its tensors are stored as {stored}, which is not supported")
    return FLOATING[stored]


def _read_header(path: Path, prefix: bytes, descriptor: int) -> bytes:
    """Returns the JSON header of a safetensors file, whose first 8 bytes are its length (little-endian)."""
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
    if length is None or length > os.fstat(descriptor).st_size - 8:
        raise unreadable(path, "its header is incomplete")
    return os.pread(descriptor, length, 8)


def _extents(path: Path, header: bytes) -> list[tuple[int, int]]:
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        offsets = (tensors[name]["data_offsets"] for name in sorted(tensors))
        return [(int(begin), int(end)) for begin, end in offsets]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, reason: object) -> ModelError:
    """The error of a file that is no safetensors file, or not a whole one."""
    return ModelError(f"weight file {path} is truncated or not a safetensors file: {reason}")
