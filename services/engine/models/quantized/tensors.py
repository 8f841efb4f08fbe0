"""A checkpoint with quantized layers, in which each shows its weight in the place of the tensors that are stored."""

from dataclasses import replace
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from services.engine.models.checkpoint import Checkpoint
from services.engine.models.quantized.checks import check_parts, check_values
from services.engine.models.quantized.matrices import ReadPart, StoredMatrix, stored_matrix, stored_shape
from services.engine.models.quantized.mxfp4_blocks import (
    check_exponents,
    coded_expert,
    read_experts,
)
from services.engine.models.weight_files import FLOATING
from services.engine.quantization.codes import CodedMatrix
from services.engine.quantization.float_layers import MX_BLOCK, Mxfp4Experts
from services.engine.quantization.schemes import LayerScheme, Scheme
from services.protocol.model_files.base import ModelError

_WEIGHT = ".weight"
_MARKS = (".qweight", ".weight_packed", "_blocks", _WEIGHT)


class _Stored(NamedTuple):
    """A quantized layer."""

    name: str
    layer: LayerScheme

    @property
    def shown(self) -> str:
        """Returns the name of the tensor in whose place the layer's are."""
        return self.name if isinstance(self.layer, Mxfp4Experts) else f"{self.name}{_WEIGHT}"


class QuantizedTensors:
    """A `TensorSource` of the files of one directory. Use as a context manager; tensors outlive it.

    Layers that are stored as numbers, and all other tensors, are those of the files.
    """

    lends = False

    def __init__(self, files: Checkpoint, scheme: Scheme) -> None:
        """Takes over the open files. Raises ModelError for a quantized layer that quantization_config does not name."""
        self._files = files
        self._scheme = scheme
        try:
            self._layers = {stored.shown: stored for stored in map(self._layer, self._quantized())}
        except BaseException:
            files.__exit__(None, None, None)
            raise
        parts = {f"{name}{end}" for name, layer in self._layers.values() for end in layer.parts(0, 0)}
        self._names = frozenset((files.names - parts) | self._layers.keys())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)

    @property
    def names(self) -> frozenset[str]:
        """Returns the names of all tensors, with weights in the place of their parts."""
        return self._names

    def home(self, name: str) -> str:
        """Returns the name of the file that holds a tensor, or a weight's codes."""
        stored = self._layers.get(name)
        return self._files.home(name if stored is None else f"{stored.name}{stored.layer.mark}")

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of the stored numbers; of quantized ones float32, that of the numbers that they mean."""
        return torch.float32 if name in self._layers else self._files.dtype(name)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelError unless the tensor is there with this shape, and can be read."""
        if name not in self._layers:
            self._files.check(name, shape)
            return
        stored = self._layers[name]
        try:
            self._check(stored, shape)
        except ModelError as error:
            raise ModelError(f"{self.home(name)}: {error}") from error

    def read(self, name: str, dtype: torch.dtype, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """See `TensorSource.read`. Computes in float32 and casts, some rows at a time.

        Of quantized weights a little more is read than what is asked for: words around the rows or columns, and scales
        of whole rows.
        """
        if name in self._layers:
            stored = self._layers[name]
            if isinstance(stored.layer, Mxfp4Experts):
                return read_experts(self._reader(stored.name), dtype, *self._places(name, rows, columns))
            return self._matrix(name, rows, columns).numbers(dtype)
        tensor = self._files.read(name, dtype, rows, columns)
        return tensor.clone() if self._files.lends else tensor

    def coded(self, name: str, rows: slice | None = None, columns: slice | None = None) -> CodedMatrix | None:
        """See `TensorSource.coded`. Columns begin and end with a group; with an order of inputs they are all.

        Of a tensor of all experts, [experts, in, out], rows name one expert, the matrix is its [out, in], and columns
        may be any.
        """
        if name not in self._layers:
            return None
        stored = self._layers[name]
        if isinstance(stored.layer, Mxfp4Experts):
            experts, inputs = self._places(name, rows, columns)
            whole = len(experts) == 1 and len(inputs) > 0
            return coded_expert(self._reader(stored.name), experts.start, inputs) if whole else None
        _, depth = self._shape(name)
        matrix = self._matrix(name, rows, columns)
        coded = matrix.coded(depth) if matrix.codes.numel() else None
        return _copied(coded) if coded is not None and self._files.lends else coded

    def _matrix(self, name: str, rows: slice | None, columns: slice | None) -> StoredMatrix:
        _, depth = self._shape(name)
        stored = self._layers[name]
        return stored_matrix(stored.layer, self._reader(stored.name), *self._places(name, rows, columns), depth)

    def _places(self, name: str, rows: slice | None, columns: slice | None) -> tuple[range, range]:
        """Returns the rows and the columns of a tensor that slices name."""
        sizes = zip(self._shape(name), (rows, columns), strict=True)
        own, across = (range(size)[part or slice(None)] for size, part in sizes)
        return own, across

    def _check(self, stored: _Stored, shape: tuple[int, ...]) -> None:
        name, layer = stored.name, stored.layer
        of_experts = isinstance(layer, Mxfp4Experts)
        if len(shape) != 2 + of_experts:
            raise ModelError(f"tensor {name}{layer.mark} is quantized as {layer.form}, but it is no such tensor")
        out, depth = (shape[2], shape[1]) if of_experts else shape
        if (reason := layer.misfit(out, depth)) is not None:
            raise ModelError(f"{name} cannot be stored as {layer.form}: {reason}")
        parts = layer.parts(out, depth, shape[0]) if isinstance(layer, Mxfp4Experts) else layer.parts(out, depth)
        check_parts(name, parts, lambda end: self._described(name, end))
        if of_experts:
            check_exponents(name, self._reader(name))
        else:
            check_values(name, layer, self._reader(name), out, depth)

    def _shape(self, name: str) -> tuple[int, int]:
        """Returns [out, in] of a weight, or the numbers of experts and of inputs, by the shapes of what is stored."""
        stored = self._layers[name]
        _, codes = self._files.stored(f"{stored.name}{stored.layer.mark}")
        if isinstance(stored.layer, Mxfp4Experts):
            return codes[0], codes[2] * MX_BLOCK
        return stored_shape(stored.layer, codes, self._reader(stored.name))

    def _reader(self, name: str) -> ReadPart:
        def part(end: str, rows: slice | None, columns: slice | None) -> Tensor | None:
            whole = f"{name}{end}"
            return self._files.raw(whole, rows, columns) if whole in self._files.names else None

        return part

    def _described(self, name: str, end: str) -> tuple[str, tuple[int, ...]] | None:
        whole = f"{name}{end}"
        return self._files.stored(whole) if whole in self._files.names else None

    def _quantized(self) -> list[str]:
        """Returns the names of the tensors that have codes."""
        found = [name for name in sorted(self._files.names) if name.endswith(_MARKS)]
        return [name for name in found if not name.endswith(_WEIGHT) or self._files.stored(name)[0] not in FLOATING]

    def _layer(self, codes: str) -> _Stored:
        name = codes.removesuffix(next(mark for mark in _MARKS if codes.endswith(mark)))
        layer, home = self._scheme.layer(name), self._files.home(codes)
        if layer is None:
            raise ModelError(
                f"{home}: tensor {codes} is quantized, but quantization_config of config.json excludes {name}, or "
                "does not name it"
            )
        if f"{name}{layer.mark}" != codes:
            raise ModelError(f"{home}: tensor {codes} contradicts quantization_config: {name} is {layer.form}")
        return _Stored(name, layer)


def _copied(matrix: CodedMatrix) -> CodedMatrix:
    """Returns the matrix in memory of its own, where its tensors may lie in a mapped file."""
    return replace(matrix, codes=matrix.codes.clone(), scales=matrix.scales.clone())
