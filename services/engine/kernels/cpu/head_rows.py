"""Copies rows of one head (keys, values, queries or results) between tensors and a thread's working memory.

In the working memory a row consists of 32-bit words, padded to whole vectors. A word is two bfloat16 or a float32.
"""

from typing import Any

from numba import float32, int64

from services.engine.kernels.cpu.elements import ELEMENTS, Element
from services.engine.kernels.cpu.intrinsics import float_pointer, half_pointer, njit
from services.engine.kernels.cpu.kv_forms import KvForm, make_decode
from services.engine.kernels.cpu.vectors import LANES, load_floats, spread, store_floats

_LINE = 64  # bytes


def padded(head_dim: int) -> int:
    """Returns the number of elements in a padded row."""
    return -(-head_dim // (2 * LANES)) * 2 * LANES


@njit
def clear(target: int, num_bytes: int) -> None:
    """Writes zeros, in whole cache lines."""
    for line in range(0, num_bytes, _LINE):
        store_floats(target + line, spread(0.0))


def make_read(element: Element, head_dim: int, *, as_pairs: bool) -> Any:
    """Makes a function that kernels call. Its arguments: address of a row of head_dim elements; address of a row of
    words, whose padding stays as it is.

    as_pairs: words are two bfloat16, and so is `element`; else float32.
    """
    if as_pairs:
        return make_copy(head_dim * 2)
    load, load_vector, pointer, size = element.load, element.load_vector, element.pointer, element.size
    whole = head_dim // LANES * LANES

    @njit
    def read(source: int, target: int) -> None:
        for d in range(0, whole, LANES):
            store_floats(target + d * 4, load_vector(source + d * size))
        for d in range(whole, head_dim):
            float_pointer(target)[d] = load(pointer(source), d)

    return read


def make_copy(num_bytes: int) -> Any:
    """Makes a function that kernels call. Its arguments: address of a row of so many bytes, a multiple of 2; address of
    its copy.
    """
    whole = num_bytes // _LINE * _LINE

    @njit
    def copy(source: int, target: int) -> None:
        for at in range(0, whole, _LINE):
            store_floats(target + at, load_floats(source + at))
        of, to = half_pointer(source), half_pointer(target)
        for i in range(whole // 2, num_bytes // 2):
            to[i] = of[i]

    return copy


def make_write(element: Element, head_dim: int) -> Any:
    """Makes a function that kernels call. Its arguments: address of a row of float32; address of the rounded row."""
    store, store_vector, pointer, size = element.store, element.store_vector, element.pointer, element.size
    whole = head_dim // LANES * LANES

    @njit
    def write(source: int, target: int) -> None:
        for d in range(0, whole, LANES):
            store_vector(target + d * size, load_floats(source + d * 4))
        for d in range(whole, head_dim):
            store(pointer(target), d, float_pointer(source)[d])

    return write


def make_read_rows(dtype: str, head_dim: int, block_size: int, *, as_pairs: bool, form: KvForm = KvForm.PLAIN) -> Any:
    """Makes a function that kernels call.

    Its arguments: address of a head's keys, or values, in the first block; elements from block to block; the block
    table's row; first key, and how many keys; the address to which it writes one row of words after the other, padded
    with zeros.

    form: of the pool. Codes are multiplied by their token's scale, but not by a static one.
    """
    if form.is_coded:
        return _make_decode_rows(dtype, head_dim, block_size, form, as_pairs=as_pairs)
    element = ELEMENTS[dtype]
    read, size = make_read(element, head_dim, as_pairs=as_pairs), element.size
    word_size = 2 if as_pairs else 4
    row_bytes, pad_at = padded(head_dim) * word_size, head_dim * word_size // _LINE * _LINE

    @njit
    def read_rows(pool: int, block_stride: int, table: Any, first: int, count: int, target: int) -> None:
        for k in range(first, first + count):
            source = pool + (int64(table[k // block_size]) * block_stride + k % block_size * head_dim) * size
            clear(target + pad_at, row_bytes - pad_at)
            read(source, target)
            target += row_bytes

    return read_rows


def _make_decode_rows(dtype: str, head_dim: int, block_size: int, form: KvForm, *, as_pairs: bool) -> Any:
    has_scales = form.has_token_scales
    decode = make_decode(form, head_dim, dtype if as_pairs else "float32", scaled=has_scales)
    word_size, codes_bytes = 2 if as_pairs else 4, block_size * head_dim
    row_bytes, pad_at = padded(head_dim) * word_size, head_dim * word_size // _LINE * _LINE

    @njit
    def read_rows(pool: int, block_stride: int, table: Any, first: int, count: int, target: int) -> None:
        for k in range(first, first + count):
            plane, position = pool + int64(table[k // block_size]) * block_stride, k % block_size
            scale = float_pointer(plane + codes_bytes)[position] if has_scales else float32(1)
            clear(target + pad_at, row_bytes - pad_at)
            decode(plane + position * head_dim, scale, target)
            target += row_bytes

    return read_rows
