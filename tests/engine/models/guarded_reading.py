"""Reads part of a tensor in a process that may read few other pages of the file: `python -m ... FILE TENSOR PART WHAT`.

PART is "first:end,first:end" of rows and columns, each empty for all. WHAT is "part", or "whole" for the tensor as a
whole. Prints the sum of what was read. Dies of SIGSEGV if it touches a page that has nothing of the part.
"""

import ctypes
import json
import mmap
import struct
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader

from services.engine.models.architectures import parse_model_config
from services.engine.models.registry import open_tensors
from services.protocol.model_files.open import open_model

_NONE, _PAGE = 0, mmap.PAGESIZE
_GGUF_NAMES = {"gate_proj": "ffn_gate", "down_proj": "ffn_down"}
_BLOCK, _BLOCK_BYTES = 32, 34  # of Q8_0


def in_safetensors(path: Path, name: str) -> tuple[int, int, int, int]:
    """The first byte of a float32 tensor, its rows, the bytes of a row, and numbers of a byte's unit."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    entry = json.loads(raw[8 : 8 + length])[name]
    assert entry["dtype"] == "F32"
    rows, columns = entry["shape"]
    return 8 + length + entry["data_offsets"][0], rows, columns * 4, 1


def in_gguf(path: Path, name: str) -> tuple[int, int, int, int]:
    """The same of a tensor in Q8_0."""
    theirs = f"blk.0.{_GGUF_NAMES[name.split('.')[-2]]}.weight"
    (tensor,) = (tensor for tensor in GGUFReader(path).tensors if tensor.name == theirs)
    assert tensor.tensor_type.name == "Q8_0"
    rows, row_bytes = tensor.data.shape
    return int(tensor.data_offset), rows, row_bytes, _BLOCK


def wanted_pages(path: Path, name: str, rows: slice | None, columns: slice | None) -> np.ndarray:
    """bool[pages]: those that have something of the part."""
    start, num_rows, row_bytes, unit = (in_gguf if path.suffix == ".gguf" else in_safetensors)(path, name)
    unit_bytes = 4 if unit == 1 else _BLOCK_BYTES
    begin, end = (
        (0, row_bytes) if columns is None else (place // unit * unit_bytes for place in (columns.start, columns.stop))
    )
    wanted = np.zeros(-(-path.stat().st_size // _PAGE), dtype=bool)
    wanted[start // _PAGE] = True  # torch looks at the begin of a tensor when it makes a view of its storage
    for row in range(num_rows)[rows or slice(None)]:
        first = start + row * row_bytes
        wanted[(first + begin) // _PAGE : (first + end - 1) // _PAGE + 1] = True
    return wanted


def guard(path: Path, readable: np.ndarray) -> None:
    """Takes the right to read from all pages of the file's mappings but these."""
    libc = ctypes.CDLL(None, use_errno=True)
    num_guarded = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if not line.endswith(str(path)):
            continue
        span, _, offset, *_ = line.split()
        first, end = (int(place, 16) for place in span.split("-"))
        for index in range((end - first) // _PAGE):
            page = int(offset, 16) // _PAGE + index
            if not readable[page]:
                code = libc.mprotect(ctypes.c_void_p(first + index * _PAGE), ctypes.c_size_t(_PAGE), _NONE)
                assert code == 0, ctypes.get_errno()
                num_guarded += 1
    assert num_guarded > 0.5 * len(readable), "the file is mapped, and most of it is guarded"


def main(path: Path, name: str, part: str, what: str) -> None:
    rows, columns = (slice(*map(int, ends.split(":"))) if ends else None for ends in part.split(","))
    config = parse_model_config(open_model(path).config())
    file = path if path.is_file() else path / "model.safetensors"
    readable = wanted_pages(file, name, rows, columns)
    with open_tensors(path, config, torch.device("cpu")) as source:
        guard(file.resolve(), readable)
        found = source.read(name, torch.float32, *((rows, columns) if what == "part" else ()))
        print(found.double().sum().item())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
