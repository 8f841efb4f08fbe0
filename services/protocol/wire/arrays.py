"""numpy arrays as bytes: little-endian, packed."""

import numpy as np

from services.protocol.wire.errors import WireError


def array_bytes(array: np.ndarray, dtype: str) -> bytes:
    """Packs an array in the message's dtype."""
    return array.astype(dtype, copy=False).tobytes()


def parse_array(raw: bytes, dtype: str, name: str) -> np.ndarray:
    """Views bytes as an array that cannot be written to. Raises WireError, which names the field."""
    if len(raw) % np.dtype(dtype).itemsize:
        raise WireError(f"{name} has {len(raw)} bytes, not a multiple of {np.dtype(dtype).itemsize}")
    return np.frombuffer(raw, dtype)


def check_lengths(length: int, *arrays: np.ndarray) -> None:
    """Raises WireError unless all arrays have this length."""
    if any(len(array) != length for array in arrays):
        raise WireError(f"arrays of lengths {[len(array) for array in arrays]} where {length} belong")
