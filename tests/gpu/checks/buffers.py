"""Tensors within larger memory that is full of poison, which shows a kernel that reads or writes beside them."""

from math import prod

import torch
from torch import Tensor

POISON = 0xFF  # a byte; numbers made of it are NaN, or -1
_AROUND = 0xFE  # NaN or huge: what is made of it is neither poison nor any sensible result
_MARGIN = 4096  # bytes on either side


class Buffer:
    """`tensor` has poison in each element and `_AROUND` around it.

    stride: elements from row to row, where these are not those of a row.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, stride: int | None = None
    ) -> None:
        row = prod(shape[1:])
        stride = row if stride is None else stride
        size = shape[0] * stride * dtype.itemsize
        self._bytes = torch.full((_MARGIN + -(-size // 16) * 16 + _MARGIN,), _AROUND, dtype=torch.uint8, device=device)
        rows = self._bytes[_MARGIN : _MARGIN + size].view(dtype).view(shape[0], stride)
        self.tensor = rows[:, :row].unflatten(1, shape[1:]) if shape[1:] else rows[:, 0]
        poison(self.tensor)

    def is_clean(self) -> bool:
        """Tells whether all bytes around the tensor are as they were. Overwrites the tensor."""
        _fill(self.tensor, _AROUND)
        return bool((self._bytes == _AROUND).all())


def within(values: Tensor, stride: int | None = None) -> Tensor:
    """Copies values into the tensor of a Buffer."""
    tensor = Buffer(tuple(values.shape), values.dtype, values.device, stride).tensor
    tensor.copy_(values)
    return tensor


def poison(tensor: Tensor) -> None:
    """Fills a tensor with poison. Elements of the last dimension are next to each other."""
    _fill(tensor, POISON)


def _fill(tensor: Tensor, byte: int) -> None:
    (tensor[:, None] if tensor.ndim == 1 else tensor).view(torch.uint8).fill_(byte)
