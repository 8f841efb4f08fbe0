"""The seam between a model and the source of its tensors: a checkpoint's files, or a substitute for them."""

from typing import Protocol

import torch
from torch import Tensor


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

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns a tensor, cast. Raises ModelError."""
