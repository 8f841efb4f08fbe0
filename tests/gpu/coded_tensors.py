"""A checkpoint whose linear layers and experts are stored as codes, in several ways."""

from collections.abc import Mapping
from functools import cache
from math import gcd

import torch
from torch import Tensor

from services.engine.models.tensor_source import TensorSource, WrappedTensors, index_of
from services.engine.quantization.codes import Code, CodedMatrix, Inputs
from services.protocol.model_files.base import ModelError

_NO_LAYERS = ("embed_tokens.weight", "norm.weight", "layernorm.weight", "gate.weight")


def rounded(numbers: Tensor, code: Code, group: int, inputs: Inputs = Inputs.AS_THEY_ARE) -> CodedMatrix:
    """Rounds a matrix [out, in] to the nearest codes. group: the largest part of it that divides the depth counts."""
    depth = numbers.shape[1]
    group = gcd(group, depth) if group < depth else depth
    grouped = numbers.to(torch.float32).unflatten(1, (depth // group, group))
    offsets = None
    if code is Code.UINT4:
        offsets, highest = grouped.amin(dim=2), grouped.amax(dim=2)
        scales = (highest - offsets).clamp(min=1e-8) / 15
    else:
        scales = grouped.abs().amax(dim=2).clamp(min=1e-8) / code.values().nan_to_num().abs().max()
    wanted = (grouped - (0 if offsets is None else offsets[:, :, None])) / scales[:, :, None]
    order = code.values().nan_to_num(torch.inf).argsort()
    values = code.values().nan_to_num(torch.inf)[order]
    above = torch.bucketize(wanted, values).clamp(1, len(values) - 1)
    nearest = torch.where(wanted - values[above - 1] < values[above] - wanted, above - 1, above)
    return CodedMatrix(code, order[nearest].to(torch.uint8).flatten(1), scales, offsets, group, None, inputs)


class CodedTensors(WrappedTensors):
    """A `TensorSource` that rounds another's layers. ways: code, group and inputs by the ends of layers' names."""

    def __init__(self, source: TensorSource, ways: Mapping[str, tuple[Code, int, Inputs]]) -> None:
        super().__init__(source)
        self._ways = ways
        self._matrix = cache(self._rounded)

    def read(self, name: str, dtype: torch.dtype, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        matrix = self._matrix(name)
        if matrix is None:
            return super().read(name, dtype, rows, columns)
        return matrix.numbers(dtype)[index_of(rows, columns)]

    def coded(self, name: str, rows: slice | None = None, columns: slice | None = None) -> CodedMatrix | None:
        if rows is not None or columns is not None:
            raise ModelError(f"{name} is read whole here")
        return self._matrix(name)

    def _rounded(self, name: str) -> CodedMatrix | None:
        if not name.endswith(".weight") or name.endswith(_NO_LAYERS):
            return None
        way = next((way for end, way in self._ways.items() if name.removesuffix(".weight").endswith(end)), None)
        return None if way is None else rounded(self._source.read(name, torch.float32), *way)
