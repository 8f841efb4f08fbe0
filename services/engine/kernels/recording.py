"""Kernels that are run one after the other in one parallel region: recorded once, and run again with other inputs.

What CUDA graphs are to a GPU: of a small step, a good part is the way from Python into each kernel.
"""

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numba import cfunc, int64, types
from torch import Tensor

from services.engine.kernels.intrinsics import call_at, fetch_add, load_acquire, long_pointer, pause
from services.engine.kernels.per_item import ITEM_COUNTER, THREAD_COUNTER

_CALL_WORDS = 32  # the kernel's address, then its arguments; at the end, how many threads began and ended it
_BEGAN, _ENDED = 30, 31
_TRIES = 500
_ROWS = 128  # at least, of a buffer: so that recordings for other numbers of rows use the same memory
_BUFFERS = 4  # of one width, used in turn: a layer needs a result for two more operations
_ALIASING_BYTES = 1024  # rows this far apart, or a multiple, share few places in the first cache
_APART = 32  # elements
T = TypeVar("T")
_SCHED_YIELD = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


class Recording(Generic[T]):
    """Calls of kernels, and what they are to return."""

    def __init__(self, pointers: Sequence[int]) -> None:
        """pointers: addresses of the inputs, all different. What is given one is given the new one later."""
        assert len(set(pointers)) == len(pointers)
        self._pointers = list(pointers)
        self._calls = bytearray()
        self._num_empties: dict[tuple[int, torch.dtype], int] = {}

    def add(self, *words: int) -> None:
        """A call: the kernel's address and its arguments."""
        self._calls += _packing(len(words)).pack(*words)

    def empty(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[rows, width], for a result that the next three of this width do not outlive.

        Rows that are read together are so far apart that they have different places in the cache.
        """
        number = self._num_empties.get((width, dtype), 0)
        self._num_empties[width, dtype] = number + 1
        return _buffer(number % _BUFFERS, -(-rows // _ROWS) * _ROWS, width, dtype)[:rows, :width]

    def finish(self, result: T) -> None:
        """All calls are there."""
        self.result = result
        self._words = np.frombuffer(self._calls, dtype=np.int64).reshape(-1, _CALL_WORDS)
        flat = self._words.reshape(-1)
        self._places = [np.flatnonzero(flat == pointer) for pointer in self._pointers]

    def rewind(self, pointers: Sequence[int]) -> None:
        """As it was before it ran, for other inputs."""
        flat = self._words.reshape(-1)
        for places, pointer in zip(self._places, pointers, strict=True):
            flat[places] = pointer
        self._words[:, 1 + ITEM_COUNTER] = 0
        self._words[:, 1 + THREAD_COUNTER] = 0
        self._words[:, _BEGAN:] = 0

    def argument(self) -> Any:
        """For the function that `make_program` makes."""
        return (ctypes.c_int64 * 4)(len(self._words), self._words.ctypes.data, _CALL_WORDS * 8, _SCHED_YIELD)


def make_program() -> Any:
    """A C function of a pointer to int64: how many calls; where they lie, and bytes from one to the next; the address
    of sched_yield. Each thread makes all calls.

    A call is over when all its items are: a thread that came to none of them, because another process has its core, is
    not waited for. So that it has to come to that, and the other process not to wait, threads offer their core between
    calls rather than lose it in the middle of an item.
    """

    @cfunc(types.void(types.CPointer(int64)), error_model="numpy")
    def program(a: Any) -> None:
        for number in range(a[0]):
            at = a[1] + number * a[2]
            began, ended = long_pointer(at + _BEGAN * 8), long_pointer(at + _ENDED * 8)
            fetch_add(began, 1)
            call_at(long_pointer(at)[0], at + 8)  # when it returns, all items are taken
            fetch_add(ended, 1)
            call_at(a[3], 0)
            tries = 0
            while True:
                num_ended = load_acquire(ended)  # before the other, or a thread that came for nothing would count
                if num_ended == load_acquire(began):
                    break
                tries += 1
                if tries % _TRIES == 0:
                    call_at(a[3], 0)
                pause()

    return program


@cache
def _buffer(_number: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    apart = 0 if width * dtype.itemsize % _ALIASING_BYTES else _APART
    return torch.empty(rows, width + apart, dtype=dtype)


@cache
def _packing(num_words: int) -> struct.Struct:
    assert num_words <= _BEGAN
    return struct.Struct(f"{num_words}q{(_CALL_WORDS - num_words) * 8}x")
