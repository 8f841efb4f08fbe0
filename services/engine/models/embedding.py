"""The embedding: a row of numbers for each token, of a table or of codes that a kernel decodes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.engine.kernels.ranks import RankLink

if TYPE_CHECKING:
    from services.engine.kernels.cpu.coded_panels import CodedPanels


@dataclass(frozen=True, slots=True)
class RankTokens:
    """The tokens whose rows a rank has, where ranks share an embedding."""

    tokens: range
    link: RankLink


class Embedding:
    """A matrix [vocab, width] whose rows are looked up. An output layer may be the same matrix."""

    __slots__ = ("_dtype", "_own", "_panels", "_table", "name")

    def __init__(
        self, name: str, matrix: "Tensor | CodedPanels", dtype: torch.dtype, own: RankTokens | None = None
    ) -> None:
        """name: of the tensor. dtype: of the rows, and of a matrix in numbers. own: the tokens whose rows the matrix
        has; None: all.
        """
        self.name = name
        self._own = own
        self._table = matrix if isinstance(matrix, Tensor) else None
        self._panels = None if isinstance(matrix, Tensor) else matrix
        self._dtype = dtype
        if self._panels is not None:
            self._rows(torch.zeros(1, dtype=torch.int64))  # compiles the kernel

    def __call__(self, tokens: Tensor) -> Tensor:
        """Returns the rows of tokens, int64[T], as [T, width] in memory of its own."""
        if self._own is None:
            return self._rows(tokens)
        own = self._own.tokens
        places = tokens - own.start
        is_others = (places < 0) | (places >= len(own))
        rows = self._rows(places.masked_fill_(is_others, 0)).masked_fill_(is_others[:, None], 0)
        return self._own.link.ranks.sum(rows)

    def _rows(self, tokens: Tensor) -> Tensor:
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
        """Returns the matrix in numbers, or a rank's rows of it; None: it is kept in codes."""
        return self._table

    @property
    def panels(self) -> "CodedPanels | None":
        """Returns the matrix in codes, or a rank's rows of it; None: it is kept in numbers."""
        return self._panels
