"""The dtypes that kernels compute over, and how their elements are read into float32, written and rounded."""

from dataclasses import dataclass
from typing import Any

from services.engine.kernels.cpu.intrinsics import (
    float_pointer,
    half_pointer,
    load_bfloat16,
    load_float32,
    round_bfloat16,
    round_float32,
    store_bfloat16,
    store_float32,
)
from services.engine.kernels.cpu.vectors import (
    as_it_is,
    load_bfloat16s,
    load_floats,
    round_bfloat16s,
    store_bfloat16s,
    store_floats,
    store_twice_bfloat16s,
    store_twice_floats,
)


@dataclass(frozen=True, slots=True)
class Element:
    """The functions for one dtype, which numba compiles into a kernel."""

    size: int  # bytes
    pointer: Any  # address -> pointer
    load: Any  # pointer, index -> float32
    store: Any  # pointer, index, float32
    round: Any  # float32 -> the nearest float32 that the dtype can hold
    load_vector: Any  # address -> 16 float32
    store_vector: Any  # address, 16 float32
    store_vectors: Any  # address, 2 times 16 float32
    round_vector: Any  # `round` for 16 float32


ELEMENTS = {
    "bfloat16": Element(
        2,
        half_pointer,
        load_bfloat16,
        store_bfloat16,
        round_bfloat16,
        load_bfloat16s,
        store_bfloat16s,
        store_twice_bfloat16s,
        round_bfloat16s,
    ),
    "float32": Element(
        4,
        float_pointer,
        load_float32,
        store_float32,
        round_float32,
        load_floats,
        store_floats,
        store_twice_floats,
        as_it_is,
    ),
}
