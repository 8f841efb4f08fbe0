"""Products of heads, each with a weight of its own: y[t, h] = x[t, h] W[h]ᵀ, by register tiles.

Each head's weight is packed in panels of 32 outputs, as in `matmul`. An item is some panels of a head, and all rows: so
each weight is read once for up to _ROWS rows.
"""

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numba import int64
from torch import Tensor

from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.head_rows import make_read, make_write
from services.engine.kernels.cpu.intrinsics import njit
from services.engine.kernels.cpu.matmul import pack, padded
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.register_tiles import (
    COLUMNS,
    ROW_BYTES,
    STEP_BYTES,
    Arithmetic,
    arithmetic_of,
    multiply_rows,
)
from services.engine.kernels.cpu.team import the_team

_PANELS = 4  # of an item
_ROWS = 64  # that are multiplied with a panel before the next one
_AHEAD = 4096  # bytes
_LINE = 64


class HeadProducts:
    """The products of some heads, in the weight's dtype."""

    __slots__ = ("_compiled", "_heads", "_out", "_weight")

    def __init__(self, weight: Tensor) -> None:
        """weight: [heads, out, depth], accepted by `can_pack`."""
        assert can_pack(weight)
        self._heads, self._out, depth = weight.shape
        by_panels = torch.nn.functional.pad(weight, (0, 0, 0, padded(self._out) - self._out))
        self._weight = pack(by_panels.flatten(0, 1))
        self._compiled = _compiled(str(weight.dtype).removeprefix("torch."), depth, self._out)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps [rows, heads, depth] to [rows, heads, out]. The numbers of a row's heads lie next to each other."""
        rows, heads, depth = x.shape
        assert heads == self._heads
        assert x.stride(1) == depth, x.stride()
        team = the_team()
        out = team.empty(rows, heads * self._out, x.dtype)
        team.run(
            self._compiled.kernel,
            heads * _items(self._out),
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            self._weight.data_ptr(),
            rows,
            -(-self._compiled.scratch.ctypes.data // _LINE) * _LINE,
            at_a_time=1,
        )
        return out.unflatten(1, (heads, self._out))


def can_pack(weight: Tensor) -> bool:
    """Returns True if there is a kernel for this weight, [heads, out, depth]."""
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and weight.shape[2] % 2 == 0)


def _items(out: int) -> int:
    """Returns the items of a head."""
    return -(-padded(out) // (COLUMNS * _PANELS))


class _Compiled:
    """The kernel of products of one kind, and its scratch memory, for all threads."""

    def __init__(self, dtype: str, depth: int, out: int) -> None:
        self._kind = dtype, depth, out
        scratch_bytes = _sums_bytes() + _ROWS * depth * 4
        self.kernel = make_head_products(dtype, depth, out)
        self.scratch = np.empty(the_team().max_threads * scratch_bytes + _LINE, dtype=np.uint8)

    def origin(self) -> "partial[_Compiled]":
        """Returns the call that makes the same in any process."""
        return partial(_compiled, *self._kind)


@cache
def _compiled(dtype: str, depth: int, out: int) -> _Compiled:
    return _Compiled(dtype, depth, out)


def _sums_bytes() -> int:
    return _ROWS * ROW_BYTES


@per_item
def make_head_products(dtype: str, depth: int, out: int) -> Any:
    """Makes the kernel. An item is up to _PANELS panels of a head.

    Arguments of the kernel: x, heads of `depth` numbers, and the elements from row to row; target, heads of `out`
    numbers, and the elements from row to row; packed weight; rows; _ROWS rows of sums and of float32[depth] for each
    thread, on a 64-byte border.
    """
    arg = places("x stride target target_stride weight rows scratch")
    element, arithmetic = ELEMENTS[dtype], arithmetic_of(dtype)
    widens, of_step, a_bytes = arithmetic is Arithmetic.WIDENED, arithmetic.depth, arithmetic.a_bytes
    multiply, widen = multiply_rows(arithmetic), make_read(element, depth, as_pairs=False)
    size, steps, panels, items = element.size, depth // of_step, padded(out) // COLUMNS, _items(out)
    write, write_last = make_write(element, COLUMNS), make_write(element, out - (panels - 1) * COLUMNS)
    sums_bytes, wide_bytes = _sums_bytes(), depth * 4
    thread_bytes = sums_bytes + _ROWS * wide_bytes

    @njit
    def multiply_panel(
        x: int, stride: int, rows: int, panel: int, weight: int, sums: int, target: int, apart: int
    ) -> None:
        multiply(rows, x, stride, a_bytes, weight, steps, sums, True, weight + _AHEAD, STEP_BYTES)
        for row in range(rows):
            at = target + row * apart + panel * COLUMNS * size
            if panel < panels - 1:
                write(sums + row * ROW_BYTES, at)
            else:
                write_last(sums + row * ROW_BYTES, at)

    @njit
    def work(a: Any, item: int, thread: int) -> None:
        head, first = item // items, item % items * _PANELS
        sums = a[arg.scratch] + thread * thread_bytes
        weight = a[arg.weight] + head * panels * steps * STEP_BYTES
        for begin in range(0, a[arg.rows], _ROWS):
            rows = min(_ROWS, a[arg.rows] - begin)
            x, stride = a[arg.x] + (begin * a[arg.stride] + head * depth) * size, a[arg.stride] * size
            target = a[arg.target] + (begin * a[arg.target_stride] + head * out) * size
            if widens:
                for row in range(rows):
                    widen(x + row * stride, sums + sums_bytes + row * wide_bytes)
                x, stride = sums + sums_bytes, int64(wide_bytes)
            for panel in range(first, min(first + _PANELS, panels)):
                at = weight + panel * steps * STEP_BYTES
                multiply_panel(x, stride, rows, panel, at, sums, target, a[arg.target_stride] * size)

    return work
