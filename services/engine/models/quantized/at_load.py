"""A source of tensors whose linear layers are quantized while they are read: `--quantization int8` and `int4`."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from services.engine.models.linear_names import is_linear, is_of_all_experts
from services.engine.models.tensor_source import TensorSource, WrappedTensors
from services.engine.quantization.codes import CodedMatrix

Quantize = Callable[[Tensor], CodedMatrix]


class QuantizedAtLoad(WrappedTensors):
    """A `TensorSource` that shows what another has, with the numbers that are left after quantization.

    Matrices that are stored as codes stay as they are.
    """

    def __init__(self, source: TensorSource, quantize: Quantize) -> None:
        super().__init__(source)
        self._quantize = quantize

    def read(self, name: str, dtype: torch.dtype, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """See `TensorSource.read`. Whole rows are read of a matrix that is quantized, since a scale is theirs."""
        if is_of_all_experts(name):
            return self._read_experts(name, dtype, rows, columns)
        if not is_linear(name) or self._source.coded(name, slice(0, 1)) is not None:
            return self._source.read(name, dtype, rows, columns)
        numbers = self._whole_rows(name, rows).numbers(dtype)
        return numbers if columns is None else numbers[:, columns].clone()

    def coded(self, name: str, rows: slice | None = None, columns: slice | None = None) -> CodedMatrix | None:
        """See `TensorSource.coded`. Columns begin and end with a group."""
        if (stored := self._source.coded(name, rows, columns)) is not None:
            return stored
        if is_of_all_experts(name):
            if rows is None or rows.stop - rows.start != 1:
                return None
            return _columns_of(self._expert(name, rows), columns)
        if not is_linear(name) or self._source.coded(name, slice(0, 1)) is not None:
            return None
        matrix = self._whole_rows(name, rows)
        return _columns_of(matrix, columns) if len(matrix.codes) else None

    def _whole_rows(self, name: str, rows: slice | None) -> CodedMatrix:
        return self._quantize(self._source.read(name, self._stored(name), rows))

    def _expert(self, name: str, expert: slice) -> CodedMatrix:
        return self._quantize(self._source.read(name, self._stored(name), expert)[0].T)

    def _read_experts(self, name: str, dtype: torch.dtype, rows: slice | None, columns: slice | None) -> Tensor:
        found = self._source.read(name, self._stored(name), rows)
        numbers = torch.empty(found.shape, dtype=dtype, device=found.device)
        for place, expert in enumerate(found):
            numbers[place] = self._quantize(expert.T).numbers(dtype).T
        return numbers if columns is None else numbers[:, columns].clone()

    def _stored(self, name: str) -> torch.dtype:
        """Returns the dtype to quantize from, which does not depend on that of the model: the stored one."""
        return self._source.dtype(name)


def _columns_of(matrix: CodedMatrix, columns: slice | None) -> CodedMatrix | None:
    """Returns these columns; None: they cut a group."""
    depth = matrix.shape[1]
    across = range(depth)[columns or slice(None)]
    if len(across) == depth:
        return matrix
    if matrix.scales.shape[1] == 1 and across:
        return replace(matrix, codes=matrix.codes[:, columns].contiguous(), group=len(across))
    begin, end = across.start, across.stop
    if not across or begin % matrix.group or (end % matrix.group and end != depth):
        return None
    groups = slice(begin // matrix.group, -(-end // matrix.group))
    offsets = None if matrix.offsets is None else matrix.offsets[:, groups].contiguous()
    codes, scales = matrix.codes[:, columns].contiguous(), matrix.scales[:, groups].contiguous()
    return replace(matrix, codes=codes, scales=scales, offsets=offsets)
