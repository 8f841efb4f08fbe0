"""The places of keys and values in the pool, for attention of single tokens: of 16 rows, and of those to prefetch."""

from typing import Any

from numba import float32, int64

from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.head_rows import make_copy, padded
from services.engine.kernels.cpu.intrinsics import float_pointer, int_pointer, long_pointer, njit, prefetch_scattered
from services.engine.kernels.cpu.kv_forms import KvForm, make_decode
from services.engine.kernels.cpu.vectors import LANES

_KEYS, _LINE = LANES, 64  # keys at a time; bytes
# Keys and values are prefetched, a few lines at a time: the hardware follows no block table, and a burst of prefetches
# keeps the core from other work. On an EPYC of Zen 4, 2 to 6 times 16 keys ahead took the same time within its noise.
AHEAD = 3 * _KEYS


def make_key_at(key_bytes: int, block_size: int) -> Any:
    """Makes a function that returns the address of a key. Its arguments: address of the head's keys in the first block;
    bytes from block to block; the block table's row; the key.
    """

    @njit
    def key_at(pool: int, block_stride: int, table: Any, k: int) -> int:
        return pool + int64(table[k // block_size]) * block_stride + k % block_size * key_bytes

    return key_at


def make_rows_at(
    key_at: Any, key_bytes: int, staged_at: int, staged_row: int, contiguous: bool, *, in_pool: bool
) -> Any:
    """Makes a function that returns the address of 16 keys, or of values if the pool begins at a value.

    contiguous: 16 keys lie in one block. in_pool: they are read there; else the function copies those before the length
    to `staged_at` in the thread's memory, where a row has `staged_row` bytes.
    """
    copy = make_copy(key_bytes)

    @njit
    def rows_at(pool: int, block_stride: int, table: Any, first: int, length: int, _ahead: int, memory: int) -> int:
        if in_pool:
            return key_at(pool, block_stride, table, first)
        for k in range(first, min(first + _KEYS, length)):
            copy(key_at(pool, block_stride, table, k), memory + staged_at + (k - first) * staged_row)
            if not contiguous and k + AHEAD < length:
                ahead = key_at(pool, block_stride, table, k + AHEAD)
                for line in range(0, key_bytes, _LINE):
                    prefetch_scattered(ahead + line)
        return memory + staged_at

    return rows_at


def make_decoded_rows_at(form: KvForm, dtype: str, head_dim: int, block_size: int, staged_at: int) -> Any:
    """Makes a function that writes 16 rows of codes to `staged_at` in the thread's memory, as numbers of the dtype,
    without their scales, and returns their address. It prefetches as many others.
    """
    decode, key_at = make_decode(form, head_dim, dtype, scaled=False), make_key_at(head_dim, block_size)
    staged_row, contiguous = padded(head_dim) * ELEMENTS[dtype].size, block_size % _KEYS == 0

    @njit
    def rows_at(pool: int, block_stride: int, table: Any, first: int, length: int, ahead: int, memory: int) -> int:
        codes = key_at(pool, block_stride, table, first)
        for k in range(first, first + _KEYS if contiguous else min(first + _KEYS, length)):
            if not contiguous:
                codes = key_at(pool, block_stride, table, k)
                ahead = key_at(pool, block_stride, table, min(k + AHEAD, length - 1))
            for line in range(0, head_dim, _LINE):
                prefetch_scattered(ahead + line)
            decode(codes, float32(1), memory + staged_at + (k - first) * staged_row)
            codes += head_dim
            ahead += head_dim
        return memory + staged_at

    return rows_at


def make_scale_at(head_dim: int, block_size: int) -> Any:
    """Makes a function that returns the address of a key's scale, with the arguments of `make_key_at`."""
    codes_bytes = block_size * head_dim

    @njit
    def scale_at(pool: int, block_stride: int, table: Any, k: int) -> int:
        return pool + int64(table[k // block_size]) * block_stride + codes_bytes + k % block_size * 4

    return scale_at


def make_scales_at(scale_at: Any, block_size: int) -> Any:
    """Makes a function that returns the address of 16 keys' scales, or of values' if the pool begins at a value.

    Its arguments: address of the head's plane in the first block; bytes from block to block, the block table's row,
    the first key, the length; address of room for 16 scales, where those go that do not lie together.
    """
    contiguous = block_size % _KEYS == 0

    @njit
    def scales_at(pool: int, place: Any, room: int) -> int:
        block_stride, table, first, length = place
        if contiguous:
            return scale_at(pool, block_stride, table, first)
        for k in range(first, min(first + _KEYS, length)):
            float_pointer(room)[k - first] = float_pointer(scale_at(pool, block_stride, table, k))[0]
        return room

    return scales_at


def make_rows_ahead_at(key_at: Any, scale_at: Any, following_at: int, *, contiguous: bool) -> Any:
    """Makes a function that returns the addresses of 16 keys to be prefetched, of this item or of the next one, and of
    their scales.

    following_at: in the thread's memory, the next item's pool, table, first key and length.
    """

    @njit
    def rows_ahead_at(
        pool: int, block_stride: int, table: Any, later: int, length: int, memory: int
    ) -> tuple[int, int]:
        if not contiguous:
            return 0, 0  # nobody prefetches there: `rows_at` does it
        if later < length:
            return key_at(pool, block_stride, table, later), scale_at(pool, block_stride, table, later)
        following = long_pointer(memory + following_at)
        own = following[2] // _KEYS * _KEYS + later - (length + _KEYS - 1) // _KEYS * _KEYS
        own = min(own, (following[3] - 1) // _KEYS * _KEYS)
        next_pool, next_table = following[0], int_pointer(following[1])
        return key_at(next_pool, block_stride, next_table, own), scale_at(next_pool, block_stride, next_table, own)

    return rows_ahead_at
