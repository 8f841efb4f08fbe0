"""The embedding: a row of numbers for each token, of a table or of codes that a kernel decodes."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from services.engine.kernels.cpu.coded_panels import CodedPanels


class Embedding:
    """A matrix [vocab, width] whose rows are looked up. An output layer may be the same matrix."""

    __slots__ = ("_dtype", "_panels", "_table", "name")

    def __init__(self, name: str, matrix: "Tensor | CodedPanels", dtype: torch.dtype) -> None:
        """name: of the tensor. dtype: of the rows, and of a matrix in numbers."""
        self.name = name
        self._table = matrix if isinstance(matrix, Tensor) else None
        self._panels = None if isinstance(matrix, Tensor) else matrix
        self._dtype = dtype
        if self._panels is not None:
            self(torch.zeros(1, dtype=torch.int64))  # compiles the kernel

    def __call__(self, tokens: Tensor) -> Tensor:
        """Returns the rows of tokens, int64[T], as [T, width] in memory of its own."""
        if self._table is not None:
            return self._table[tokens]
        from services.engine.kernels.cpu.coded_rows import decoded_rows

        assert self._panels is not None
        return decoded_rows(self._panels, tokens, self._dtype)

    @property
    def device(self) -> torch.device:
        """Returns the device of the rows."""
        return torch.device("cpu") if self._table is None else self._table.device

    @property
    def table(self) -> Tensor | None:
        """Returns the matrix in numbers; None: it is kept in codes."""
        return self._table

    @property
    def panels(self) -> "CodedPanels | None":
        """Returns the matrix in codes; None: it is kept in numbers."""
        return self._panels
