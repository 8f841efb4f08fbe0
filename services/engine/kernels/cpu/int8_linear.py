"""Linear layers in int8: codes of a weight are multiplied by codes of rows, which are made when the rows are read."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from services.engine.kernels.cpu import int8_matmul
from services.engine.kernels.cpu.amx import int8_matmul as amx_int8_matmul
from services.engine.kernels.cpu.int8_matmul import DEPTH_OF_STEP, MOST_DEPTH, pack_codes, pack_numbers
from services.engine.kernels.cpu.int8_rows import int8_rows
from services.engine.kernels.cpu.intrinsics import ISA
from services.engine.kernels.cpu.panel_linear import PanelLinear, ProductKernels
from services.engine.kernels.cpu.team import the_team
from services.engine.quantization.codes import Code, CodedMatrix, Inputs

_DTYPES = (torch.bfloat16, torch.float32)


class Int8Linear(PanelLinear):
    """A linear layer, x W^T + b, of codes with a scale for each row of W. See `int8_matmul` for what it computes."""

    __slots__ = ()

    _kernels: "_Kernels"

    def __init__(self, matrices: Sequence[CodedMatrix], bias: Tensor | None, dtype: torch.dtype) -> None:
        """matrices: one below the other, accepted by `can_multiply`. bias: [columns]. dtype: of x and of the result."""
        assert can_multiply(matrices, dtype)
        codes = torch.cat([_in_order(matrix) for matrix in matrices])
        scales = torch.cat([matrix.scales[:, 0].to(torch.float32) for matrix in matrices])
        self._kernels = _kernels(str(dtype).removeprefix("torch."))
        self._weight = pack_codes(codes, self._kernels.depth_of_block)
        self._columns, self._length = len(codes), self._weight.shape[1]
        self._numbers = pack_numbers(codes, scales, bias)

    def _read(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        return self._kernels.rows.read(the_team(), x, len(x), self._length)


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


class _Kernels(ProductKernels):
    """The kernels over one dtype, and what makes codes of rows."""

    def __init__(self, dtype: str) -> None:
        kind: Any = amx_int8_matmul if ISA.has_amx else int8_matmul
        super().__init__(kind, partial(kind.make_int8_matmul, dtype), partial(_kernels, dtype))
        self.rows = int8_rows(dtype)
        self.depth_of_block = amx_int8_matmul.DEPTH if ISA.has_amx else DEPTH_OF_STEP


@cache
def _kernels(dtype: str) -> _Kernels:
    return _Kernels(dtype)
