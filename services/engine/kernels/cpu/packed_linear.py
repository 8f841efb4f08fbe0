"""Linear layers by kernels, with a weight that is packed in panels."""

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.engine.kernels.cpu import matmul
from services.engine.kernels.cpu.amx import matmul as amx_matmul
from services.engine.kernels.cpu.intrinsics import ISA
from services.engine.kernels.cpu.matmul import pack, padded
from services.engine.kernels.cpu.register_tiles import COLUMNS
from services.engine.kernels.cpu.team import Team, the_team

# Most panels of an item, fewer if threads would have too few items to share evenly; and items for each thread, at
# least. With 4 to 16 panels, a product of 1,848 rows took the same time within 5 %.
_MOST_PANELS, _LEAST_ITEMS = 12, 8
_DTYPES = (torch.bfloat16, torch.float32)


class PackedLinear:
    """A linear layer, x W^T + b, that computes in the weight's dtype."""

    __slots__ = ("_bias", "_columns", "_depth", "_kernels", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [columns, depth], accepted by `can_pack`."""
        assert can_pack(weight)
        self._columns, self._depth = weight.shape
        self._kernels = _kernels(str(weight.dtype).removeprefix("torch."), _fits_amx(weight))
        self._weight = pack(weight)
        self._bias = None
        if bias is not None:
            self._bias = torch.zeros(padded(self._columns), dtype=torch.float32)
            self._bias[: self._columns] = bias

    def columns(self, begin: int, end: int) -> "PackedLinear | None":
        """Returns a layer for some columns of the result, which shares their panels; None: they are no whole panels."""
        if begin % COLUMNS or end % COLUMNS:
            return None
        part = PackedLinear.__new__(PackedLinear)
        part._columns, part._depth, part._kernels = end - begin, self._depth, self._kernels
        part._weight = self._weight[begin // COLUMNS : end // COLUMNS]
        part._bias = None if self._bias is None else self._bias[begin:end]
        return part

    @property
    def can_gate(self) -> bool:
        """Returns True if each half of the columns consists of whole panels."""
        return self._columns % (2 * COLUMNS) == 0

    def __call__(self, x: Tensor, *, gated: bool = False) -> Tensor:
        """Maps [rows, depth] to [rows, columns], or with `gated` to [rows, columns / 2]: SiLU(first half) * second
        half.
        """
        assert self.can_gate or not gated
        rows, kernels, team = len(x), self._kernels, the_team()
        width = self._columns // 2 if gated else self._columns
        panels = padded(width) // COLUMNS
        out = team.empty(rows, panels * COLUMNS, x.dtype)
        rows_at_once, panels_at_once, skipped = items_of(team, rows, panels, kernels.most_rows)
        team.run(
            kernels.gated if gated else kernels.plain,
            -(-rows // rows_at_once) * -(-panels // panels_at_once),
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            self._weight.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            rows,
            self._depth,
            panels,
            kernels.scratch,
            rows_at_once,
            panels_at_once,
            skipped,
            kernels.configs.ctypes.data,
            at_a_time=1,
        )
        return out[:, :width]


def items_of(team: Team, rows: int, panels: int, most_rows: int) -> tuple[int, int, int]:
    """Returns the rows and the panels of an item of a product, and the panels between the end of an item and the next
    item of its thread. most_rows: of an item.
    """
    if team.rows_at_once is not None:
        return team.rows_at_once, panels, -panels
    threads = team.num_threads
    panels_at_once = max(1, min(_MOST_PANELS, panels * -(-rows // most_rows) // (_LEAST_ITEMS * threads)))
    return most_rows, panels_at_once, (threads - 1) * panels_at_once


def can_pack(weight: Tensor) -> bool:
    """Returns True if there is a kernel for this weight."""
    return weight.dtype in _DTYPES and (weight.dtype == torch.float32 or weight.shape[1] % 2 == 0)


class _Kernels:
    """The kernels of products of one kind, and their scratch memory."""

    def __init__(self, dtype: str, *, by_amx: bool) -> None:
        kind: Any = amx_matmul if by_amx else matmul
        self._kind = dtype, by_amx
        self.plain, self.gated = kind.make_matmul(dtype, gated=False), kind.make_matmul(dtype, gated=True)
        self.most_rows = kind.MOST_ROWS
        self.configs = amx_matmul.block_configs()
        self._memory = np.empty(the_team().max_threads * kind.SCRATCH_BYTES + 64, dtype=np.uint8)
        self.scratch = -(-self._memory.ctypes.data // 64) * 64

    def origin(self) -> "partial[_Kernels]":
        """Returns the call that makes the same in any process."""
        return partial(_kernels, *self._kind)


@cache
def _kernels(dtype: str, by_amx: bool) -> _Kernels:
    return _Kernels(dtype, by_amx=by_amx)


def _fits_amx(weight: Tensor) -> bool:
    columns, depth = weight.shape
    whole = columns % (2 * COLUMNS) == 0 and depth % amx_matmul.BLOCK == 0
    return ISA.has_amx and weight.dtype == torch.bfloat16 and whole
