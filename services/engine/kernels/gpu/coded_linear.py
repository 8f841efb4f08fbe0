"""Linear layers whose weights stay as they are stored: 4-bit and 8-bit codes, multiplied by Triton kernels.

What a layer has of matrices lies one below the other. Each is packed once and multiplied with inputs as they are, or
with inputs that are rounded at each call to int8 or e4m3.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.kernels.gpu.coded_product import multiply_into
from services.engine.kernels.gpu.coded_tile import Rows
from services.engine.kernels.gpu.packed_codes import PackedCodes, pack
from services.engine.kernels.gpu.rows import quantize_rows
from services.engine.quantization.codes import CodedMatrix, Inputs


class CodedProduct:
    """A linear layer. It takes over `bias` [out]."""

    __slots__ = ("_bias", "_out", "_parts")

    def __init__(self, parts: Sequence[PackedCodes], bias: Tensor | None) -> None:
        self._parts = tuple(parts)
        self._bias = bias
        self._out = sum(part.shape[0] for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps [rows, in] to [rows, out], in the dtype of x. Rows may lie apart, their numbers not."""
        y = torch.empty((len(x), self._out), dtype=x.dtype, device=x.device)
        begin = 0
        for part in self._parts:
            end = begin + part.shape[0]
            bias = None if self._bias is None else self._bias[begin:end]
            multiply_into(rows_for(part, x), part, bias, y[:, begin:end])
            begin = end
        return y


def coded_product(matrices: tuple[CodedMatrix, ...], bias: Tensor | None) -> CodedProduct | None:
    """Makes a linear layer of codes, see `MakeCodedProduct`."""
    parts = [part for matrix in matrices if (part := pack(matrix)) is not None]
    return CodedProduct(parts, bias) if len(parts) == len(matrices) else None


def rows_for(weight: PackedCodes, x: Tensor) -> Rows:
    """Returns the rows of x [rows, in] in the order of the weight's codes, and rounded as it asks for."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if weight.inputs is Inputs.AS_THEY_ARE:
        return Rows(x)
    if weight.inputs is Inputs.E4M3_GROUPS:
        codes, scales = quantize_rows(x.reshape(-1, weight.group))
        return Rows(codes.view(x.shape), scales.view(len(x), -1))
    return Rows(*quantize_rows(x, torch.int8 if weight.inputs is Inputs.INT8 else torch.float8_e4m3fn))
