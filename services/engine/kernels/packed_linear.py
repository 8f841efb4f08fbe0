"""Linear layers by AMX, with a weight that oneDNN has packed."""

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.engine.kernels.amx import has_amx
from services.engine.kernels.matmul import BLOCK, MOST_ROWS, SCRATCH_BYTES, block_configs, make_matmul, pack
from services.engine.kernels.team import the_team

# Of an item: units, but fewer where threads would have too few items to share evenly. With 4 to 16 units, a product of
# 1,848 rows took the same to 5 %.
_MOST_UNITS, _LEAST_ITEMS = 12, 8


class PackedLinear:
    """x W^T + b, bfloat16."""

    __slots__ = ("_bias", "_columns", "_depth", "_shared", "_weight")

    def __init__(self, weight: Tensor, packed: Tensor, bias: Tensor | None) -> None:
        """weight: [columns, depth], for its shape. packed: what oneDNN made of it, which has to stay."""
        self._columns, self._depth = weight.shape
        self._weight = torch.ops.mkldnn.data_ptr(packed)
        self._bias = None if bias is None else bias.to(torch.float32)
        self._shared = _shared()

    def __call__(self, x: Tensor, *, gated: bool = False) -> Tensor:
        """[rows, depth] -> [rows, columns], or with `gated` [rows, columns / 2]: SiLU(first half) * second half."""
        rows, shared, columns = len(x), self._shared, self._columns
        width = columns // 2 if gated else columns
        out = shared.team.empty(rows, width, x.dtype)
        units, rows_at_once = width // BLOCK, shared.team.rows_at_once
        if rows_at_once is None:
            rows_at_once = MOST_ROWS
            threads = shared.team.num_threads
            units_at_once = max(1, min(_MOST_UNITS, units * -(-rows // rows_at_once) // (_LEAST_ITEMS * threads)))
            skipped = (threads - 1) * units_at_once
        else:
            units_at_once, skipped = units, -units
        shared.team.run(
            shared.kernels[gated],
            -(-rows // rows_at_once) * -(-units // units_at_once),
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            self._weight,
            0 if self._bias is None else self._bias.data_ptr(),
            rows,
            self._depth,
            columns,
            shared.configs.ctypes.data,
            shared.scratch,
            rows_at_once,
            units_at_once,
            skipped,
            at_a_time=1,
        )
        return out


class _Shared:
    """What all products of a process share."""

    def __init__(self) -> None:
        self.team = the_team()
        self.kernels: tuple[Any, Any] = make_matmul(gated=False), make_matmul(gated=True)
        self.configs = block_configs()
        self._memory = np.empty(self.team.max_threads * SCRATCH_BYTES + 64, dtype=np.uint8)
        self.scratch = -(-self._memory.ctypes.data // 64) * 64


@cache
def _shared() -> _Shared:
    return _Shared()


def packed_linear(weight: Tensor, packed: Tensor, bias: Tensor | None) -> PackedLinear | None:
    """None: not for this processor or shape, or oneDNN packs in another way than it did."""
    columns, depth = weight.shape
    if columns % (2 * BLOCK) or depth % BLOCK or not has_amx() or not _lies_as_expected(weight, packed):
        return None
    return PackedLinear(weight, packed, bias)


def _lies_as_expected(weight: Tensor, packed: Tensor) -> bool:
    num_bytes = weight.numel() * 2
    if torch.ops.mkldnn._nbytes(packed) < num_bytes:
        return False
    found = np.ctypeslib.as_array((ctypes.c_int16 * (num_bytes // 2)).from_address(torch.ops.mkldnn.data_ptr(packed)))
    ends = pack(weight[:BLOCK]), pack(weight[-BLOCK:])
    first, last = (end.view(torch.int16).flatten().numpy() for end in ends)
    return bool(np.array_equal(found[: len(first)], first) and np.array_equal(found[-len(last) :], last))
