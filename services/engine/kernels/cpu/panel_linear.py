"""A linear layer whose weight is packed in panels of 32 columns: what layers of numbers and of int8 have in common."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

from torch import Tensor

from services.engine.kernels.cpu.amx.matmul import block_configs
from services.engine.kernels.cpu.matmul import padded
from services.engine.kernels.cpu.product_items import items_of
from services.engine.kernels.cpu.register_tiles import COLUMNS
from services.engine.kernels.cpu.scratch import scratch
from services.engine.kernels.cpu.team import Kernel, the_team


class ProductKernels:
    """The kernels of products of one kind, and their scratch memory."""

    def __init__(self, kind: Any, make: Callable[..., Kernel], made_by: "partial[Any]") -> None:
        """kind: their module. make: makes one of them, `gated` or not. made_by: the call that returns this object."""
        self.plain, self.gated = make(gated=False), make(gated=True)
        self.most_rows: int = kind.MOST_ROWS
        self.scratch_bytes: int = kind.SCRATCH_BYTES  # of a thread
        self.scratch = scratch(self.scratch_bytes)
        self._configs = block_configs()
        self.configs: int = self._configs.ctypes.data  # their address
        self._made_by = made_by

    def origin(self) -> "partial[Any]":
        """Returns the call that makes the same in any process."""
        return self._made_by


class PanelLinear:
    """A linear layer, x W^T + b. A class made of it says how it is packed, and in which form a kernel reads x."""

    __slots__ = ("_columns", "_kernels", "_length", "_numbers", "_weight")

    _columns: int
    _kernels: ProductKernels
    _length: int  # of the depth, in the unit of the kernels' argument
    _numbers: Tensor | None  # float32[panels, ...]: what columns have beside their weights, biases for one
    _weight: Tensor  # [panels, steps, 32, depth of a step]

    def columns(self, begin: int, end: int) -> Self | None:
        """Returns a layer for some columns of the result, which shares their panels; None: they are no whole panels."""
        if begin % COLUMNS or end % COLUMNS:
            return None
        part, panels = type(self).__new__(type(self)), slice(begin // COLUMNS, end // COLUMNS)
        part._columns, part._length, part._kernels = end - begin, self._length, self._kernels
        part._weight = self._weight[panels]
        part._numbers = None if self._numbers is None else self._numbers[panels]
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
        read, arguments = self._read(x)
        width = self._columns // 2 if gated else self._columns
        panels = padded(width) // COLUMNS
        out = team.empty(rows, panels * COLUMNS, x.dtype)
        rows_at_once, panels_at_once, skipped = items_of(team, rows, panels, kernels.most_rows)
        team.run(
            kernels.gated if gated else kernels.plain,
            -(-rows // rows_at_once) * -(-panels // panels_at_once),
            *arguments,
            out.data_ptr(),
            out.stride(0),
            self._weight.data_ptr(),
            0 if self._numbers is None else self._numbers.data_ptr(),
            rows,
            self._length,
            panels,
            kernels.scratch,
            rows_at_once,
            panels_at_once,
            skipped,
            kernels.configs,
            at_a_time=1,
        )
        del read  # not sooner: the kernel reads it
        return out[:, :width]

    def _read(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Returns what a kernel reads of x, and its arguments that say where."""
        raise NotImplementedError
