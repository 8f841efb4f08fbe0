"""The header of a GGUF file: its metadata and the place of each tensor. Needs neither torch nor the `gguf` package.

    "GGUF" | version | tensors | entries | entries: key, type, value | tensors: name, shape, type, offset | pad | data

Numbers are little-endian; a string is its length in 8 bytes and then UTF-8; a shape has its fastest axis first. Source:
docs/gguf.md of the ggml project. The `gguf` package's own reader makes several arrays of each string of the vocabulary:
it took 2.2 s and 162 MiB for the demo model's file in every process, this module 0.04 s and 11 MiB (AMD EPYC, Zen 4).
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from services.protocol.model_files.base import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 counted in 32 bits; nobody writes it any more
_MAX_DIMENSIONS = 4  # ggml's own limit
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    number: struct.Struct(f"<{code}")
    for number, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
    }.items()
}  # fmt: skip
_U32, _U64 = _NUMBERS[4], _NUMBERS[10]
# No model has more. Larger numbers in a damaged file could take all memory.
_MAX_ITEMS, _MAX_STRING_BYTES, _MAX_ALIGNMENT = 1 << 22, 1 << 24, 1 << 16
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file."""

    shape: tuple[int, ...]  # slowest axis first, as in torch
    ggml_type: int  # the format of its values; the `gguf` package names the numbers
    offset: int  # of its first byte, from the start of the file


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata and the list of tensors of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]  # by name
    data_start: int  # bytes before the first tensor

    def text(self, key: str) -> str | None:
        """Returns an entry that is a text; None if it is missing. Raises ModelError."""
        return self._typed(key, str, "a text")

    def flag(self, key: str, default: bool) -> bool:
        """Returns an entry that is true or false; the default if it is missing. Raises ModelError."""
        found = self._typed(key, bool, "true or false")
        return default if found is None else found

    def items(self, key: str, kind: type[_T]) -> list[_T]:
        """Returns an entry that is a list, which must be there. Raises ModelError."""
        found = self.metadata.get(key)
        if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
            raise ModelError(f"{self.path.name}: {key} is missing or no list of {kind.__name__}")
        return found

    def _typed(self, key: str, kind: type[_T], words: str) -> _T | None:
        found = self.metadata.get(key)
        if found is not None and not isinstance(found, kind):
            raise ModelError(f"{self.path.name}: {key} is not {words}")
        return found


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads the header of a GGUF file. Raises ModelError if it is no GGUF file, damaged, or of another version.

    A count in the file is used only if the file is long enough for so many items, and no list or text may be longer
    than a model's.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(content).header(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, struct.error, IndexError) as error:  # of mmap for an empty file, of UTF-8, and our own
        raise ModelError(f"{path} is damaged or no GGUF file: {error}") from error


class _Reader:
    """Reads values one after the other."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._size = len(content)
        self._at = 0

    def header(self, path: Path) -> GgufHeader:
        if self._content[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._number(_U32)
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, known are {' and '.join(map(str, _VERSIONS))}, little-endian")
        num_tensors, num_entries = self._count(), self._count()
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._number(_U32))
        listed = dict(self._tensor() for _ in range(num_tensors))
        if len(listed) != num_tensors:
            raise ValueError("two tensors have one name")
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = min(-(-self._at // alignment) * alignment, self._size)
        tensors = {name: GgufTensor(shape, kind, start + offset) for name, (shape, kind, offset) in listed.items()}
        for name, tensor in tensors.items():
            if tensor.offset > self._size:
                raise ValueError(f"it ends before tensor {name}")
        return GgufHeader(path, metadata, tensors, start)

    def _tensor(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name = self._string()
        num_dimensions = self._number(_U32)
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        fastest_first = [self._number(_U64) for _ in range(num_dimensions)]
        return name, (tuple(reversed(fastest_first)), self._number(_U32), self._number(_U64))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number(_U32))
        if kind not in _NUMBERS:
            raise ValueError(f"a value of type {kind}")
        return self._number(_NUMBERS[kind])

    def _array(self, kind: int) -> list[Any]:
        count = self._count()
        if count > _MAX_ITEMS:
            raise ValueError(f"a list of {count} items")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"an array of type {kind}")
        code, size = _NUMBERS[kind].format[1:], _NUMBERS[kind].size
        if self._at + count * size > self._size:
            raise ValueError("the file ends inside its header")
        values = struct.unpack_from(f"<{count}{code}", self._content, self._at)
        self._at += count * size
        return list(values)

    def _number(self, kind: struct.Struct) -> Any:
        (value,) = kind.unpack_from(self._content, self._at)
        self._at += kind.size
        return value

    def _count(self) -> int:
        """Reads the number of items that follow. Each has at least one byte."""
        count: int = self._number(_U64)
        if count > self._size - self._at:
            raise ValueError("the file ends inside its header")
        return count

    def _string(self) -> str:
        (length,) = _U64.unpack_from(self._content, self._at)
        start = self._at + 8
        self._at = start + length
        if self._at > self._size:
            raise ValueError("the file ends inside its header")
        if length > _MAX_STRING_BYTES:
            raise ValueError(f"a text of {length} bytes")
        return self._content[start : self._at].decode()
