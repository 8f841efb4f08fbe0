"""Kernels that are recorded, and then run in one parallel region.

`Recording`: one after the other, and again with other inputs. What CUDA graphs are to a GPU: of a small step, a good
part is the way from Python into each kernel.

`RowBlocks`: all of them for some rows, then all of them for the next. What one kernel writes the next one finds in the
cache of the same core.
"""

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numba import int64, types
from torch import Tensor

from services.engine.kernels.cpu.compiled import compiled
from services.engine.kernels.cpu.intrinsics import address_of, call_at, fetch_add, load_acquire, long_pointer, pause
from services.engine.kernels.cpu.per_item import AT_A_TIME, ITEM_COUNTER, NUM_ITEMS, THREAD_COUNTER

_CALL_WORDS = 32  # the kernel's address, then its arguments; at the end, how many threads began and ended it
_BEGAN, _ENDED = 30, 31
_TRIES = 500
_ROWS = 128  # at least, of a buffer: so that recordings for other numbers of rows use the same memory
_BUFFERS = 4  # of one width, used in turn: a layer needs a result for two more operations
_LINE_BYTES = 64
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
        return _buffer(number % _BUFFERS, -(-rows // _ROWS) * _ROWS, width, dtype)[:rows]

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


class RowBlocks:
    """Calls of kernels that compute each row of their results from the same row of what they are given."""

    def __init__(self, rows: int, rows_at_once: int, max_threads: int) -> None:
        self.rows_at_once = rows_at_once
        self._max_threads = max_threads
        self._num_blocks = -(-rows // rows_at_once)
        self._calls = bytearray()
        self._empties: list[Tensor] = []  # until they have run

    def add(self, *words: int) -> None:
        """A call: the kernel's address and its arguments. It takes the items of a block at a time."""
        self._calls += _packing(len(words)).pack(*words)

    def empty(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """See `empty_rows`. There is memory for a whole block of each thread."""
        whole = empty_rows(max(rows, self._max_threads * self.rows_at_once), width, dtype)
        self._empties.append(whole)
        return whole[:rows]

    def at_a_time(self, num_items: int) -> int:
        """How many of a kernel's items, which are as many as there are rows or blocks, belong to a block."""
        return 1 if num_items == self._num_blocks else self.rows_at_once

    def argument(self, results: Sequence[Tensor]) -> Any:
        """For the function that `make_row_program` makes. results: what is looked at afterwards.

        Of anything else that was made on the way, a thread uses the same rows for all blocks, which so stay in its
        cache.
        """
        self._words = np.frombuffer(self._calls, dtype=np.int64)
        self._shifts = np.zeros_like(self._words)
        kept = {result.untyped_storage().data_ptr() for result in results}
        for tensor in self._empties:
            start = tensor.data_ptr()
            if start not in kept:
                inside = (self._words >= start) & (self._words < start + tensor.untyped_storage().nbytes())
                self._shifts[inside] = self.rows_at_once * tensor.stride(0) * tensor.itemsize
        self._copies = np.empty(self._max_threads * _CALL_WORDS, dtype=np.int64)
        return (ctypes.c_int64 * 8)(
            len(self._words) // _CALL_WORDS,
            self._words.ctypes.data,
            self._shifts.ctypes.data,
            self._copies.ctypes.data,
            self._num_blocks,
            self._max_threads,
        )


@compiled(types.CPointer(int64))
def make_row_program() -> Any:
    """A C function of a pointer to int64: how many calls; where they lie; as many words, to be added to theirs as often
    as the thread's number is above the block's; memory for one call for each thread; blocks of rows; threads; two
    counters. Each thread makes all calls for a block, and takes the next one.
    """

    def program(a: Any) -> None:
        threads_begun, blocks_begun = long_pointer(address_of(a) + 6 * 8), long_pointer(address_of(a) + 7 * 8)
        thread = fetch_add(threads_begun, 1)
        if thread >= a[5]:
            return
        copy_at = a[3] + thread * _CALL_WORDS * 8
        copy = long_pointer(copy_at)
        block = fetch_add(blocks_begun, 1)
        while block < a[4]:
            for number in range(a[0]):
                offset = number * _CALL_WORDS * 8
                call, shifts = long_pointer(a[1] + offset), long_pointer(a[2] + offset)
                for i in range(_CALL_WORDS):
                    copy[i] = call[i] + shifts[i] * (thread - block)
                start = block * copy[1 + AT_A_TIME]
                copy[1 + ITEM_COUNTER] = start
                copy[1 + NUM_ITEMS] = min(start + copy[1 + AT_A_TIME], copy[1 + NUM_ITEMS])
                copy[1 + THREAD_COUNTER] = thread
                call_at(copy[0], copy_at + 8)
            block = fetch_add(blocks_begun, 1)

    return program


@compiled(types.CPointer(int64))
def make_program() -> Any:
    """A C function of a pointer to int64: how many calls; where they lie, and bytes from one to the next; the address
    of sched_yield. Each thread makes all calls.

    A call is over when all its items are: a thread that came to none of them, because another process has its core, is
    not waited for. So that it has to come to that, and the other process not to wait, threads offer their core between
    calls rather than lose it in the middle of an item.
    """

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


def empty_rows(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width], whose rows begin an odd number of cache lines apart where they are whole lines.

    An even number, and rows would share places in the caches, all of them the same one of 64 where it is a power of 2:
    64-byte stores to rows 8,192 bytes apart took a matrix product twice its time.
    """
    lines, rest = divmod(width * dtype.itemsize, _LINE_BYTES)
    apart = _LINE_BYTES // dtype.itemsize if rest == 0 and lines % 2 == 0 else 0
    return torch.empty(rows, width + apart, dtype=dtype)[:, :width]


@cache
def _buffer(_number: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return empty_rows(rows, width, dtype)


@cache
def _packing(num_words: int) -> struct.Struct:
    assert num_words <= _BEGAN
    return struct.Struct(f"{num_words}q{(_CALL_WORDS - num_words) * 8}x")
