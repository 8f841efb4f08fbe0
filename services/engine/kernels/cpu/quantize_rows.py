"""Rows of activations to codes of int8, with a scale for each row: what products in int8 multiply.

    code[i] = round(x[i] * (127 / largest)), ties to even        scale = largest / 127        largest = max |x[i]|

(Dettmers et al. 2022, arXiv 2208.07339, section 2.1, with rows as the vectors.)

A row of codes is followed by its scale, float32. Codes have 128 added: VPDPBUSD and AMX's TDPBUSD take an unsigned and
a signed factor. The scale of a row with NaN or infinities is NaN, and so is all that is multiplied by it.
"""

import math
from typing import Any

from numba import float32, int64, uint32

from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.int8_vectors import (
    bits_of_largest,
    larger_magnitude,
    store_bytes,
    store_split_bytes,
    whole_codes,
)
from services.engine.kernels.cpu.intrinsics import (
    address_of,
    bits_float,
    float_pointer,
    int_pointer,
    njit,
    stack,
)
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.vectors import LANES, load_floats, spread

_INFINITY_BITS = uint32(0x7F800000)
_MOST, _NAN = float32(127), float32(math.nan)
# Rows without a number of this size are rows of zeros: 127 / largest would be infinite.
_LEAST = float32(2.0**-100)


@per_item
def make_quantize(dtype: str, *, splits: bool) -> Any:
    """Makes a kernel that quantizes rows of this dtype. An item is a row.

    Arguments of the kernel: x, and the elements from row to row in it; the row of x of each item, int32, or 0 where it
    is the item's own; how many rows there are, int32, of whose number the items may be more, or 0 where they are not;
    codes, and the bytes from row to row in them; width; the byte of a row at which its scale is.

    splits: codes are int16, in the order of `Arithmetic.SPLIT_BYTES`; else uint8. A row of codes has room for whole
    vectors of 16; what fills the last of them is the code of 0.
    """
    element = ELEMENTS[dtype]
    load_vector, load, pointer, size = element.load_vector, element.load, element.pointer, element.size
    store, code_bytes = (store_split_bytes, 2) if splits else (store_bytes, 1)
    arg = places("x stride rows_of_x num_rows codes codes_stride width scale_at")

    @njit(error_model="numpy")
    def rest_of(row: int, width: int, begin: int, rest: Any) -> None:
        """Copies what is left of a row after whole vectors, and fills up with zeros."""
        x = pointer(row)
        for i in range(LANES):
            rest[i] = load(x, begin + i) if begin + i < width else float32(0)

    @njit(error_model="numpy")
    def work(a: Any, item: int, _thread: int) -> None:
        if a[arg.num_rows] != 0 and item >= int_pointer(a[arg.num_rows])[0]:
            return
        width = a[arg.width]
        row = int64(int_pointer(a[arg.rows_of_x])[item]) if a[arg.rows_of_x] != 0 else item
        x, codes = a[arg.x] + row * a[arg.stride] * size, a[arg.codes] + item * a[arg.codes_stride]
        whole = width // LANES * LANES
        rest = stack(LANES)
        rest_of(x, width, whole, rest)
        magnitudes = larger_magnitude(spread(float32(0)), load_floats(address_of(rest)))
        for i in range(0, whole, LANES):
            magnitudes = larger_magnitude(magnitudes, load_vector(x + i * size))
        bits = bits_of_largest(magnitudes)
        largest = bits_float(bits)
        scale, factor = float32(0), float32(0)
        if bits >= _INFINITY_BITS:
            scale = _NAN
        elif largest >= _LEAST:
            scale, factor = largest / _MOST, _MOST / largest
        float_pointer(codes + a[arg.scale_at])[0] = scale
        for i in range(0, whole, LANES):
            store(codes + i * code_bytes, whole_codes(load_vector(x + i * size), factor))
        if whole < width:
            store(codes + whole * code_bytes, whole_codes(load_floats(address_of(rest)), factor))

    return work
