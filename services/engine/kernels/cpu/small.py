"""The small operations of a decoder layer: norms, rotation, activation; and the masks of its logits.

They round where `transformers` rounds, so that both choose the same tokens.
"""

import math
from typing import Any

from numba import float32, uint32

from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.exponential import gelu_tanh, silu
from services.engine.kernels.cpu.intrinsics import address_of, float64_of, long_pointer, njit, stack, word_pointer
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.vectors import LANES

_THREE_VECTORS = 3 * LANES
_ALL = uint32(0xFFFFFFFF)  # of 32 tokens
_NEVER, _LEAST = float32(-math.inf), float32(-3.3e38)


@per_item
def make_add_norm(dtype: str, *, wide: bool) -> Any:
    """Makes a kernel: x += y * factor, then the RMSNorm of x (Zhang and Sennrich 2019, arXiv 1910.07467). An item is a
    row.

    Arguments of the kernel: x [rows, width], and the elements from row to row in it; y [rows, width], or 0 for none,
    and the elements from row to row in it; weight [width]; out [rows, width], and the elements from row to row in it;
    width; eps; factor.

    wide: the weight is float32, and what it multiplies is not rounded before.
    """
    element = ELEMENTS[dtype]
    load, store, pointer, size = element.load, element.store, element.pointer, element.size
    round_ = element.round
    rounded, load_weight, weight_pointer = _of_weight(dtype, wide=wide)
    arg = places("x x_stride y y_stride weight out out_stride width eps factor")

    @njit(fastmath=True, error_model="numpy")
    def add(x: Any, y: Any, width: int) -> float:
        squares = float32(0)
        for i in range(width):
            value = round_(load(x, i) + load(y, i))
            store(x, i, value)
            squares += value * value
        return squares

    @njit(fastmath={"reassoc", "nsz"}, error_model="numpy")  # products that are rounded before they are added
    def add_scaled(x: Any, y: Any, width: int, factor: float) -> float:
        squares = float32(0)
        for i in range(width):
            value = round_(load(x, i) + round_(load(y, i) * factor))
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
            store(out, i, rounded(load(x, i) * factor) * load_weight(weight, i))

    @njit
    def work(a: Any, row: int, _thread: int) -> None:
        width, eps = a[arg.width], float32(float64_of(a[arg.eps]))
        x = pointer(a[arg.x] + row * a[arg.x_stride] * size)
        out = pointer(a[arg.out] + row * a[arg.out_stride] * size)
        factor = float32(float64_of(a[arg.factor]))
        if a[arg.y] == 0:
            squares = square(x, width)
        elif factor == float32(1):
            squares = add(x, pointer(a[arg.y] + row * a[arg.y_stride] * size), width)
        else:
            squares = add_scaled(x, pointer(a[arg.y] + row * a[arg.y_stride] * size), width, factor)
        norm(x, squares, weight_pointer(a[arg.weight]), out, width, eps)

    return work


@per_item
def make_add_normed(dtype: str) -> Any:
    """Makes a kernel: x += the RMSNorm of y, or without x, y = its RMSNorm. An item is a row.

    Arguments of the kernel: x [rows, width], or 0 for none; y [rows, width], and the elements from row to row in it;
    weight float32[width]; width; eps.
    """
    element, of_weight = ELEMENTS[dtype], ELEMENTS["float32"]
    load, store, round_, pointer, size = element.load, element.store, element.round, element.pointer, element.size
    load_weight, weight_pointer, factor_of = of_weight.load, of_weight.pointer, _factor_of_norm(dtype)
    arg = places("x y y_stride weight width eps")

    @njit
    def add(x: Any, y: Any, weight: Any, width: int, factor: float) -> None:
        for i in range(width):
            store(x, i, load(x, i) + round_(load(y, i) * factor * load_weight(weight, i)))

    @njit
    def scale(y: Any, weight: Any, width: int, factor: float) -> None:
        for i in range(width):
            store(y, i, load(y, i) * factor * load_weight(weight, i))

    @njit
    def work(a: Any, row: int, _thread: int) -> None:
        width, weight = a[arg.width], weight_pointer(a[arg.weight])
        y = pointer(a[arg.y] + row * a[arg.y_stride] * size)
        factor = factor_of(y, width, float32(float64_of(a[arg.eps])))
        if a[arg.x] == 0:
            scale(y, weight, width, factor)
        else:
            add(pointer(a[arg.x] + row * width * size), y, weight, width, factor)

    return work


@per_item
def make_rotate(dtype: str, *, wide: bool) -> Any:
    """Makes a kernel that norms, if there is a weight, and rotates the leading heads of each token in place. An item is
    a token.

    Arguments of the kernel: heads, elements from token to token, rotated heads of a token, head_dim, rotary_dim, cos
    [rows, rotary_dim], signed sin [rows, rotary_dim], weight [rotated heads, head_dim] or 0, eps.

    wide: the weight is float32, and what it multiplies is not rounded before.
    """
    element = ELEMENTS[dtype]
    load, store, round_, pointer, size = element.load, element.store, element.round, element.pointer, element.size
    rounded, load_weight, weight_pointer = _of_weight(dtype, wide=wide)
    weight_size, factor_of = ELEMENTS["float32" if wide else dtype].size, _factor_of_norm(dtype)
    arg = places("heads stride num_heads head_dim rotary_dim cos sin weight eps")

    @njit(fastmath=True, error_model="numpy")
    def norm(x: Any, weight: Any, width: int, eps: float) -> None:
        factor = factor_of(x, width, eps)
        for i in range(width):
            store(x, i, rounded(load(x, i) * factor) * load_weight(weight, i))

    @njit
    def rotate(x: Any, cos: Any, sin: Any, half: int) -> None:
        for i in range(half):
            first, second = load(x, i), load(x, half + i)
            store(x, i, round_(first * load(cos, i)) + second * load(sin, i))
            store(x, half + i, round_(second * load(cos, half + i)) + first * load(sin, half + i))

    @njit
    def work(a: Any, token: int, _thread: int) -> None:
        head_dim, rotary_dim = a[arg.head_dim], a[arg.rotary_dim]
        eps = float32(float64_of(a[arg.eps]))
        cos, sin = pointer(a[arg.cos] + token * rotary_dim * size), pointer(a[arg.sin] + token * rotary_dim * size)
        for head in range(a[arg.num_heads]):
            x = pointer(a[arg.heads] + (token * a[arg.stride] + head * head_dim) * size)
            if a[arg.weight] != 0:
                norm(x, weight_pointer(a[arg.weight] + head * head_dim * weight_size), head_dim, eps)
            rotate(x, cos, sin, rotary_dim // 2)

    return work


@per_item
def make_gated(dtype: str, activation: str) -> Any:
    """Makes a kernel of activation(gate) * up (Shazeer 2020, arXiv 2002.05202). An item is a row.

    activation: "silu" or "gelu", the latter by tanh.

    Arguments of the kernel: gate and up [rows, 2 * width], out [rows, width], each followed by the elements from row to
    row in it; width.
    """
    element = ELEMENTS[dtype]
    load, store, round_, size = element.load_vector, element.store_vector, element.round_vector, element.size
    pointer = element.pointer
    arg = places("gate_up stride out out_stride width")
    activate = {"silu": silu, "gelu": gelu_tanh}[activation]

    @njit
    def gated(gate: int, up: int, out: int) -> None:
        """Computes 16 elements of a row."""
        store(out, round_(activate(load(gate))) * load(up))

    @njit
    def gated_rest(gate: int, up: int, out: int, count: int) -> None:
        """Computes the last, fewer than 16 elements of a row, by way of 16."""
        room = address_of(stack(_THREE_VECTORS))
        for i in range(count):
            pointer(room)[i], pointer(room)[LANES + i] = pointer(gate)[i], pointer(up)[i]
        gated(room, room + LANES * size, room + 2 * LANES * size)
        for i in range(count):
            pointer(out)[i] = pointer(room)[2 * LANES + i]

    @njit
    def work(a: Any, row: int, _thread: int) -> None:
        width, gate = a[arg.width], a[arg.gate_up] + row * a[arg.stride] * size
        out = a[arg.out] + row * a[arg.out_stride] * size
        up, whole = gate + width * size, width // LANES * LANES
        for i in range(0, whole, LANES):
            gated(gate + i * size, up + i * size, out + i * size)
        if whole < width:
            gated_rest(gate + whole * size, up + whole * size, out + whole * size, width - whole)

    return work


def _of_weight(dtype: str, *, wide: bool) -> tuple[Any, Any, Any]:
    """Returns functions for a norm's weight: how a normed number is rounded before it, its load and its pointer."""
    element = ELEMENTS["float32" if wide else dtype]
    return element.round, element.load, element.pointer


def _factor_of_norm(dtype: str) -> Any:
    """Makes a function of a row, its width and eps: what the RMSNorm multiplies the row's numbers by."""
    load = ELEMENTS[dtype].load

    @njit(fastmath=True, error_model="numpy")
    def factor_of(x: Any, width: int, eps: float) -> float:
        squares = float32(0)
        for i in range(width):
            value = load(x, i)
            squares += value * value
        return float32(1) / math.sqrt(squares / float32(width) + eps)

    return factor_of


@per_item
def make_store_kv(dtype: str) -> Any:
    """Makes a kernel that copies each token's K and V heads into the pool. An item is a token.

    Arguments of the kernel: k; v; elements from token to token in both; kv_heads; head_dim; pool; int64 offset in the
    pool of each token's K in head 0; elements from head to head in the pool; elements from K to V.
    """
    pointer, size = ELEMENTS[dtype].pointer, ELEMENTS[dtype].size
    arg = places("k v stride kv_heads head_dim pool offsets head_stride plane")

    @njit
    def copy(source: Any, target: Any, count: int) -> None:
        for i in range(count):
            target[i] = source[i]

    @njit
    def work(a: Any, token: int, _thread: int) -> None:
        head_dim = a[arg.head_dim]
        for head in range(a[arg.kv_heads]):
            source = (token * a[arg.stride] + head * head_dim) * size
            target = a[arg.pool] + (long_pointer(a[arg.offsets])[token] + head * a[arg.head_stride]) * size
            copy(pointer(a[arg.k] + source), pointer(target), head_dim)
            copy(pointer(a[arg.v] + source), pointer(target + a[arg.plane] * size), head_dim)

    return work


@per_item
def make_store_latent(dtype: str) -> Any:
    """Makes a kernel that writes each token's row of latent KV into the pool: the RMSNorm of its latent, then the
    rotated part of K. An item is a token.

    Arguments of the kernel: kv [rows, rope_dim + rank], and the elements from row to row in it; rank; rope_dim; cos and
    signed sin [rows, rope_dim]; weight [rank]; eps; pool; int64 offset of each token's row in the pool.
    """
    element = ELEMENTS[dtype]
    load, store, round_, pointer, size = element.load, element.store, element.round, element.pointer, element.size
    factor_of = _factor_of_norm(dtype)
    arg = places("kv stride rank rope_dim cos sin weight eps pool offsets")

    @njit(fastmath=True, error_model="numpy")
    def norm(x: Any, weight: Any, out: Any, width: int, eps: float) -> None:
        factor = factor_of(x, width, eps)
        for i in range(width):
            store(out, i, round_(load(x, i) * factor) * load(weight, i))

    @njit
    def rotate(x: Any, cos: Any, sin: Any, out: Any, half: int) -> None:
        for i in range(half):
            first, second = load(x, i), load(x, half + i)
            store(out, i, round_(first * load(cos, i)) + second * load(sin, i))
            store(out, half + i, round_(second * load(cos, half + i)) + first * load(sin, half + i))

    @njit
    def work(a: Any, token: int, _thread: int) -> None:
        rank, rope_dim, eps = a[arg.rank], a[arg.rope_dim], float32(float64_of(a[arg.eps]))
        kv = a[arg.kv] + token * a[arg.stride] * size
        out = a[arg.pool] + long_pointer(a[arg.offsets])[token] * size
        shift = token * rope_dim * size
        norm(pointer(kv + rope_dim * size), pointer(a[arg.weight]), pointer(out), rank, eps)
        cos, sin = pointer(a[arg.cos] + shift), pointer(a[arg.sin] + shift)
        rotate(pointer(kv), cos, sin, pointer(out + rank * size), rope_dim // 2)

    return work


@per_item
def make_mask(dtype: str) -> Any:
    """Makes a kernel that sets logits of tokens which must not come to -inf. An item is a row that has a mask.

    Arguments of the kernel: logits, elements from row to row in them, vocabulary; rows, int64; bits, words of a row.
    """
    element = ELEMENTS[dtype]
    load, store, pointer, size = element.load, element.store, element.pointer, element.size
    arg = places("logits stride vocab rows bits words")

    @njit
    def work(a: Any, item: int, _thread: int) -> None:
        row = long_pointer(a[arg.rows])[item]
        x = pointer(a[arg.logits] + row * a[arg.stride] * size)
        bits = word_pointer(a[arg.bits] + item * a[arg.words] * 4)
        for word in range(a[arg.words]):
            allowed = bits[word]
            if allowed == _ALL:
                continue
            first = word * 32
            if allowed == 0 and first + 32 <= a[arg.vocab]:  # most words of most masks
                for bit in range(32):
                    store(x, first + bit, _NEVER)
                continue
            for bit in range(min(32, a[arg.vocab] - first)):
                if (allowed >> uint32(bit)) & uint32(1):
                    store(x, first + bit, max(load(x, first + bit), _LEAST))
                else:
                    store(x, first + bit, _NEVER)

    return work
