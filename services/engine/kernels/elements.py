"""The dtypes that kernels compute over: how one is read into float32, written, and rounded."""

from dataclasses import dataclass
from typing import Any

from services.engine.kernels.intrinsics import (
    float_pointer,
    half_pointer,
    load_bfloat16,
    load_float32,
    round_bfloat16,
    round_float32,
    store_bfloat16,
    store_float32,
)


@dataclass(frozen=True, slots=True)
class Element:
    """Functions that numba compiles into a kernel."""

    size: int  # bytes
    pointer: Any  # address -> pointer
    load: Any  # pointer, index -> float32
    store: Any  # pointer, index, float32
    round: Any  # float32 -> float32 that the dtype can hold


ELEMENTS = {
    "bfloat16": Element(2, half_pointer, load_bfloat16, store_bfloat16, round_bfloat16),
    "float32": Element(4, float_pointer, load_float32, store_float32, round_float32),
}
