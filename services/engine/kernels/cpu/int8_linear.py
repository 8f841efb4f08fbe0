"""Linear layers in int8: codes of a weight are multiplied by codes of rows, which are made when the rows are read."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.engine.kernels.cpu import int8_matmul
from services.engine.kernels.cpu.amx import int8_matmul as amx_int8_matmul
from services.engine.kernels.cpu.amx.matmul import block_configs
from services.engine.kernels.cpu.int8_matmul import DEPTH_OF_STEP, MOST_DEPTH, pack_codes, pack_numbers
from services.engine.kernels.cpu.intrinsics import ISA
from services.engine.kernels.cpu.matmul import padded
from services.engine.kernels.cpu.packed_linear import items_of
from services.engine.kernels.cpu.quantize_rows import make_quantize
from services.engine.kernels.cpu.register_tiles import COLUMNS, Arithmetic, arithmetic_of_codes
from services.engine.kernels.cpu.team import the_team
from services.engine.quantization.codes import Code, CodedMatrix, Inputs

_LINE = 64  # bytes
_DTYPES = (torch.bfloat16, torch.float32)


class Int8Linear:
    """A linear layer, x W^T + b, of codes with a scale for each row of W. See `int8_matmul` for what it computes."""

    __slots__ = ("_columns", "_depth", "_kernels", "_numbers", "_weight")

    def __init__(self, matrices: Sequence[CodedMatrix], bias: Tensor | None, dtype: torch.dtype) -> None:
        """matrices: one below the other, accepted by `can_multiply`. bias: [columns]. dtype: of x and of the result."""
        assert can_multiply(matrices, dtype)
        codes = torch.cat([_in_order(matrix) for matrix in matrices])
        scales = torch.cat([matrix.scales[:, 0].to(torch.float32) for matrix in matrices])
        self._columns, self._depth = codes.shape
        self._kernels = _kernels(str(dtype).removeprefix("torch."))
        self._weight = pack_codes(codes, self._kernels.depth_of_block)
        self._numbers = pack_numbers(codes, scales, bias)

    def columns(self, begin: int, end: int) -> "Int8Linear | None":
        """Returns a layer for some columns of the result, which shares their panels; None: they are no whole panels."""
        if begin % COLUMNS or end % COLUMNS:
            return None
        part = Int8Linear.__new__(Int8Linear)
        part._columns, part._depth, part._kernels = end - begin, self._depth, self._kernels
        own = slice(begin // COLUMNS, end // COLUMNS)
        part._weight, part._numbers = self._weight[own], self._numbers[own]
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
        scale_at = self._weight.shape[1] * DEPTH_OF_STEP * kernels.code_bytes
        scale_at = -(-scale_at // _LINE) * _LINE
        codes = team.empty(rows, scale_at + _LINE, torch.uint8)
        team.run(
            kernels.quantize,
            rows,
            x.data_ptr(),
            x.stride(0),
            0,
            codes.data_ptr(),
            codes.stride(0),
            self._depth,
            scale_at,
        )
        width = self._columns // 2 if gated else self._columns
        panels = padded(width) // COLUMNS
        out = team.empty(rows, panels * COLUMNS, x.dtype)
        rows_at_once, panels_at_once, skipped = items_of(team, rows, panels, kernels.most_rows)
        team.run(
            kernels.gated if gated else kernels.plain,
            -(-rows // rows_at_once) * -(-panels // panels_at_once),
            codes.data_ptr(),
            codes.stride(0),
            scale_at,
            out.data_ptr(),
            out.stride(0),
            self._weight.data_ptr(),
            self._numbers.data_ptr(),
            rows,
            self._weight.shape[1],
            panels,
            kernels.scratch,
            rows_at_once,
            panels_at_once,
            skipped,
            kernels.configs.ctypes.data,
            at_a_time=1,
        )
        return out[:, :width]


def can_multiply(matrices: Sequence[CodedMatrix], dtype: torch.dtype) -> bool:
    """Returns True if there is a kernel for these matrices, one below the other, and for x of this dtype."""
    return dtype in _DTYPES and all(map(has_kernel, matrices))


def has_kernel(matrix: CodedMatrix) -> bool:
    """Returns True for codes of int8 with a scale for each row and inputs that are rounded to int8."""
    _, depth = matrix.shape
    return (
        matrix.inputs is Inputs.INT8
        and matrix.code is Code.INT8
        and matrix.group >= depth
        and matrix.offsets is None
        and matrix.codes.device.type == "cpu"
        and 0 < depth < MOST_DEPTH
    )


def _in_order(matrix: CodedMatrix) -> Tensor:
    """Returns the codes, int8[out, in], with those of input i in column i."""
    codes = matrix.codes.view(torch.int8)
    if matrix.order is None:
        return codes
    ordered = torch.empty_like(codes)
    ordered[:, matrix.order] = codes
    return ordered


class _Kernels:
    """The kernels of products over one dtype, and their scratch memory."""

    def __init__(self, dtype: str) -> None:
        splits = arithmetic_of_codes() is Arithmetic.SPLIT_BYTES
        self.code_bytes = 2 if splits else 1
        self.quantize = make_quantize(dtype, splits=splits)
        kind: Any = amx_int8_matmul if ISA.has_amx else int8_matmul
        self.depth_of_block = amx_int8_matmul.DEPTH if ISA.has_amx else DEPTH_OF_STEP
        self.plain, self.gated = (kind.make_int8_matmul(dtype, gated=gated) for gated in (False, True))
        self.most_rows = kind.MOST_ROWS
        self.configs = block_configs()
        self._memory = np.empty(the_team().max_threads * kind.SCRATCH_BYTES + _LINE, dtype=np.uint8)
        self.scratch = -(-self._memory.ctypes.data // _LINE) * _LINE
        self._dtype = dtype

    def origin(self) -> "partial[_Kernels]":
        """Returns the call that makes the same in any process."""
        return partial(_kernels, self._dtype)


@cache
def _kernels(dtype: str) -> _Kernels:
    return _Kernels(dtype)
