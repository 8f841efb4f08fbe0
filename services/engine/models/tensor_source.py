"""The seam between a model and the source of its tensors: a checkpoint's files, a substitute for them, or what changes
what another source has.
"""

from typing import Protocol

import torch
from torch import Tensor

from services.engine.quantization.codes import CodedMatrix


class TensorSource(Protocol):
    """The source of a model's tensors, on one device. Any defect of a tensor raises a ModelError that names it."""

    @property
    def names(self) -> frozenset[str]:
        """Returns the names of all tensors."""

    @property
    def lends(self) -> bool:
        """Returns True if `read` may return a view of memory that the reader does not own: copy it to keep it."""

    def home(self, name: str) -> str:
        """Returns the name of a tensor's file or other source, for a person."""

    def dtype(self, name: str) -> torch.dtype:
        """Returns the stored dtype of a tensor. Raises ModelError if it is missing or not of a floating-point dtype."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelError unless the tensor is there with this shape and a floating-point dtype."""

    def read(self, name: str, dtype: torch.dtype, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """Returns tensor[rows, columns], cast. None: all of them. Raises ModelError.

        The slices lie within the tensor and have no step; a vector has rows alone. Of a file, little else is read than
        what is returned.
        """

    def coded(self, name: str, rows: slice | None = None, columns: slice | None = None) -> CodedMatrix | None:
        """Returns matrix[rows, columns] as codes; None: it is stored as numbers, or cannot be cut so.

        Its numbers are those that `read` returns. Of a tensor of all experts, [experts, in, out], rows name one expert
        and columns are of its inputs; the matrix is [out, in]. It shares no memory with the source. Raises ModelError.
        """


class WrappedTensors:
    """A `TensorSource` that shows what another has. What differs is a method of a class made of this one."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    @property
    def names(self) -> frozenset[str]:
        """See `TensorSource.names`."""
        return self._source.names

    @property
    def lends(self) -> bool:
        """See `TensorSource.lends`."""
        return self._source.lends

    def home(self, name: str) -> str:
        """See `TensorSource.home`."""
        return self._source.home(name)

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorSource.dtype`."""
        return self._source.dtype(name)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """See `TensorSource.check`."""
        self._source.check(name, shape)

    def read(self, name: str, dtype: torch.dtype, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """See `TensorSource.read`."""
        return self._source.read(name, dtype, rows, columns)

    def coded(self, name: str, rows: slice | None = None, columns: slice | None = None) -> CodedMatrix | None:
        """See `TensorSource.coded`."""
        return self._source.coded(name, rows, columns)


def index_of(rows: slice | None, columns: slice | None) -> tuple[slice, ...]:
    """Returns what to index a tensor by for `TensorSource.read`."""
    for part in (rows, columns):
        assert part is None or part.step in (None, 1), part
    found = slice(None) if rows is None else rows
    return (found,) if columns is None else (found, columns)
