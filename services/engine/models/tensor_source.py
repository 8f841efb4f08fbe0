"""Where a model's tensors come from: the seam between a model and a checkpoint's files, or what stands for them."""

from typing import Protocol

import torch
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]  # by the tensor's name


class TensorSource(Protocol):
    """Where a model's tensors come from, on one device. Whatever is wrong with one is a ModelError that names it."""

    @property
    def names(self) -> frozenset[str]:
        """Every tensor that is there."""

    @property
    def lends(self) -> bool:
        """Whether what `read` returns may be a view of memory that is not the reader's: copy what is to be kept."""

    def home(self, name: str) -> str:
        """Where a tensor comes from, for a person."""

    def dtype(self, name: str) -> torch.dtype:
        """The stored dtype of a tensor. Raises ModelError where it is missing or is no floating-point one."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelError unless the tensor is there with this shape and a floating-point dtype."""

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor, cast. Raises ModelError."""
