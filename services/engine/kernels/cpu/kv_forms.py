"""The forms in which KV lies in a pool: numbers as the model computes, or codes of one byte and their scales.

    form          a number is                    scales
    PLAIN         of the model's dtype           none
    INT8          code * scale, -127 to 127      of each token, behind the codes of a plane
    FP8           code * scale, e4m3             of each token, behind the codes of a plane
    FP8_STATIC    code * scale, e4m3             of each KV head of a layer, the same for all tokens

A token's scale makes the largest number of its K, or of its V, the largest code. A scale that is not finite makes all
numbers of the token NaN or infinite, as they were.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from numba import float32, uint32

from kvtransfer.layout import KvLayout
from services.engine.kernels.cpu.code_vectors import load_float8s, load_int8s, store_float8s, store_int8s
from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.intrinsics import (
    address_of,
    bits_float,
    byte_pointer,
    float_bits,
    float_pointer,
    njit,
    stack,
)
from services.engine.kernels.cpu.vectors import LANES, divide, load_floats, spread, store_floats

_SCALE_BYTES, _ROOM = 4, 2 * LANES  # float32; 16 codes and 16 float32
_LEAST = float32(1e-30)  # of a token's numbers: below it all are taken as 0
_MAGNITUDE = uint32(0x7FFFFFFF)


class KvForm(Enum):
    """A form of KV in the pool; see above."""

    PLAIN = "plain"
    INT8 = "int8"
    FP8 = "e4m3"
    FP8_STATIC = "e4m3, static scales"

    @property
    def is_coded(self) -> bool:
        """Returns True if a number is one byte."""
        return self is not KvForm.PLAIN

    @property
    def has_token_scales(self) -> bool:
        """Returns True if each token has scales of its own."""
        return self in (KvForm.INT8, KvForm.FP8)

    def item_bytes(self, dtype: str) -> int:
        """Returns the bytes of a number in the pool of a model of this dtype."""
        return 1 if self.is_coded else ELEMENTS[dtype].size

    def plane_bytes(self, dtype: str, head_dim: int, block_size: int) -> int:
        """Returns the bytes of a head's K, or V, of one layer in a block."""
        scales = _SCALE_BYTES if self.has_token_scales else 0
        return block_size * (head_dim * self.item_bytes(dtype) + scales)


def form_of(layout: KvLayout) -> KvForm:
    """Returns the form of a pool of this layout."""
    if layout.dtype == "int8":
        return KvForm.INT8
    if layout.dtype == "float8_e4m3fn":
        return KvForm.FP8 if layout.token_scales else KvForm.FP8_STATIC
    return KvForm.PLAIN


@dataclass(frozen=True, slots=True)
class _Codes:
    """The functions for codes of one kind, which numba compiles into a kernel."""

    largest: float
    load: Any  # address -> 16 float32
    store: Any  # address, 16 float32, rounded to the nearest code; too large ones become the largest


_CODES = {"int8": _Codes(127.0, load_int8s, store_int8s), "e4m3": _Codes(448.0, load_float8s, store_float8s)}


def _codes_of(form: KvForm) -> _Codes:
    return _CODES["int8" if form is KvForm.INT8 else "e4m3"]


def make_decode(form: KvForm, head_dim: int, target: str, *, scaled: bool) -> Callable[..., None]:
    """Makes a function that kernels call; it writes a row of head_dim codes as numbers of the dtype `target`.

    Its arguments: address of the codes; scale; address of the numbers. scaled: numbers are code * scale, rounded; else
    they are the codes themselves, exactly, and the scale is ignored.
    """
    element, load = ELEMENTS[target], _codes_of(form).load
    store_vectors, store_vector, size = element.store_vectors, element.store_vector, element.size
    store, pointer = element.store, element.pointer
    twice, whole = head_dim // (2 * LANES) * 2 * LANES, head_dim // LANES * LANES

    @njit
    def number(codes: int, factor: Any) -> Any:
        return load(codes) * factor if scaled else load(codes)

    @njit
    def decode(codes: int, scale: float, target: int) -> None:
        factor = spread(float32(scale))
        for d in range(0, twice, 2 * LANES):
            store_vectors(target + d * size, number(codes + d, factor), number(codes + d + LANES, factor))
        for d in range(twice, whole, LANES):
            store_vector(target + d * size, number(codes + d, factor))
        if whole < head_dim:
            room = address_of(stack(_ROOM))
            for d in range(whole, head_dim):
                byte_pointer(room)[d - whole] = byte_pointer(codes)[d]
            store_floats(room + LANES * 4, number(room, factor))
            for d in range(whole, head_dim):
                store(pointer(target), d, float_pointer(room + LANES * 4)[d - whole])

    return decode


def make_encode(form: KvForm, source: str) -> Callable[..., float]:
    """Makes a function that kernels call; it writes a row of numbers of the dtype `source` as codes.

    Its arguments: address of the numbers, and how many; address of the codes; the static scale, which a form with
    scales of tokens ignores. It returns the scale. A number is divided by the scale, as it is on a GPU.
    """
    element, codes_of = ELEMENTS[source], _codes_of(form)
    load, load_vector, pointer, size = element.load, element.load_vector, element.pointer, element.size
    store, largest, finds_scale = codes_of.store, codes_of.largest, form.has_token_scales

    @njit
    def largest_of(numbers: Any, count: int) -> float:
        """Returns the largest absolute value; NaN where one is NaN, whose bits are above those of other numbers."""
        most = uint32(0)
        for i in range(count):
            most = max(most, float_bits(load(numbers, i)) & _MAGNITUDE)
        return bits_float(most)

    @njit(error_model="numpy")
    def encode(numbers: int, count: int, codes: int, static_scale: float) -> float:
        scale = float32(static_scale)
        if finds_scale:
            most = largest_of(pointer(numbers), count)
            scale = float32(0) if most <= _LEAST else most / float32(largest)
        divisor = spread(scale if scale > 0 else float32(1))
        whole = count // LANES * LANES
        for i in range(0, whole, LANES):
            store(codes + i, divide(load_vector(numbers + i * size), divisor))
        if whole < count:
            room = address_of(stack(_ROOM))
            for i in range(whole, count):
                float_pointer(room + LANES * 4)[i - whole] = load(pointer(numbers), i)
            store(room, divide(load_floats(room + LANES * 4), divisor))
            for i in range(whole, count):
                byte_pointer(codes)[i] = byte_pointer(room)[i - whole]
        return scale

    return encode
