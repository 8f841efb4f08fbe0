"""The small operations of a decoder layer: norms, rotation, activation.

They round where `transformers` rounds, so that both choose the same tokens.
"""

import math
from typing import Any

from numba import float32, njit

from services.engine.kernels.elements import Element
from services.engine.kernels.intrinsics import LOG2_E, exp2, float64_of, long_pointer
from services.engine.kernels.per_item import per_item


def make_add_norm(element: Element) -> Any:
    """x += y, and the RMSNorm of that (Zhang and Sennrich 2019, arXiv 1910.07467). An item is a row.

    Arguments: x [rows, width]; y, the same, or 0 for none, and the elements from row to row there; weight [width]; out
    [rows, width], and the same; width; eps.
    """
    load, store, round_, pointer, size = element.load, element.store, element.round, element.pointer, element.size

    @njit(fastmath=True, error_model="numpy")
    def add(x: Any, y: Any, width: int) -> float:
        squares = float32(0)
        for i in range(width):
            value = round_(load(x, i) + load(y, i))
            store(x, i, value)
            squares += value * value
        return squares

    @njit(fastmath=True, error_model="numpy")
    def square(x: Any, width: int) -> float:
        squares = float32(0)
        for i in range(width):
            value = load(x, i)
            squares += value * value
        return squares

    @njit(fastmath=True, error_model="numpy")
    def norm(x: Any, squares: float, weight: Any, out: Any, width: int, eps: float) -> None:
        factor = float32(1) / math.sqrt(squares / float32(width) + eps)
        for i in range(width):
            store(out, i, round_(load(x, i) * factor) * load(weight, i))

    @njit
    def work(a: Any, row: int, _thread: int) -> None:
        width, eps = a[11], float32(float64_of(a[12]))
        x, y, out = pointer(a[5] + row * width * size), pointer(a[6] + row * a[7] * size), a[9] + row * a[10] * size
        squares = add(x, y, width) if a[6] != 0 else square(x, width)
        norm(x, squares, pointer(a[8]), pointer(out), width, eps)

    return per_item(work)


def make_rotate(element: Element) -> Any:
    """Norms where there is a weight, then rotates, the leading heads of each token in place. An item is a token.

    Arguments: heads, elements from token to token, rotated heads of a token, head_dim, cos [rows, head_dim],
    signed sin [rows, head_dim], weight [rotated heads, head_dim] or 0, eps.
    """
    load, store, round_, pointer, size = element.load, element.store, element.round, element.pointer, element.size

    @njit(fastmath=True, error_model="numpy")
    def norm(x: Any, weight: Any, width: int, eps: float) -> None:
        squares = float32(0)
        for i in range(width):
            value = load(x, i)
            squares += value * value
        factor = float32(1) / math.sqrt(squares / float32(width) + eps)
        for i in range(width):
            store(x, i, round_(load(x, i) * factor) * load(weight, i))

    @njit
    def rotate(x: Any, cos: Any, sin: Any, half: int) -> None:
        for i in range(half):
            first, second = load(x, i), load(x, half + i)
            store(x, i, round_(first * load(cos, i)) + second * load(sin, i))
            store(x, half + i, round_(second * load(cos, half + i)) + first * load(sin, half + i))

    @njit
    def work(a: Any, token: int, _thread: int) -> None:
        head_dim = a[8]
        eps = float32(float64_of(a[12]))
        cos, sin = pointer(a[9] + token * head_dim * size), pointer(a[10] + token * head_dim * size)
        for head in range(a[7]):
            x = pointer(a[5] + (token * a[6] + head * head_dim) * size)
            if a[11] != 0:
                norm(x, pointer(a[11] + head * head_dim * size), head_dim, eps)
            rotate(x, cos, sin, head_dim // 2)

    return per_item(work)


def make_silu_mul(element: Element) -> Any:
    """SiLU(gate) * up (Shazeer 2020, arXiv 2002.05202). An item is a row.

    Arguments: gate and up [rows, 2 * width], out [rows, width], each with the elements from row to row, width.
    """
    load, store, round_, pointer, size = element.load, element.store, element.round, element.pointer, element.size

    @njit(fastmath=True, error_model="numpy")
    def silu_mul(gate: Any, up: Any, out: Any, width: int) -> None:
        for i in range(width):
            x = load(gate, i)
            silu = x / (float32(1) + exp2(min(-x * float32(LOG2_E), float32(126))))
            store(out, i, round_(silu) * load(up, i))

    @njit
    def work(a: Any, row: int, _thread: int) -> None:
        width, at = a[9], a[5] + row * a[6] * size
        silu_mul(pointer(at), pointer(at + width * size), pointer(a[7] + row * a[8] * size), width)

    return per_item(work)


def make_store_kv(element: Element) -> Any:
    """Copies each token's K and V heads into the pool. An item is a token.

    Arguments: k, v, elements from token to token of both, kv_heads, head_dim, pool, int64 offset in the pool of each
    token's K in head 0, elements from head to head there, from K to V.
    """
    pointer, size = element.pointer, element.size

    @njit
    def copy(source: Any, target: Any, count: int) -> None:
        for i in range(count):
            target[i] = source[i]

    @njit
    def work(a: Any, token: int, _thread: int) -> None:
        head_dim = a[9]
        for head in range(a[8]):
            source = (token * a[7] + head * head_dim) * size
            target = a[10] + (long_pointer(a[11])[token] + head * a[12]) * size
            copy(pointer(a[5] + source), pointer(target), head_dim)
            copy(pointer(a[6] + source), pointer(target + a[13] * size), head_dim)

    return per_item(work)
