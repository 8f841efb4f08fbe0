"""Kernel calls that are recorded, and then run in one parallel region.

`Recording`: runs one call after the other, and again with other inputs, as CUDA graphs do on a GPU. In a small step, a
good part of the time is the way from Python into each kernel.

`RowBlocks`: runs all calls for some rows, then all calls for the next rows. A kernel finds in its core's cache what the
kernel before it wrote.
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

_CALL_WORDS = 40  # the kernel's address, then its arguments; at the end, how many threads began and ended it
_BEGAN, _ENDED = 38, 39
_TRIES = 500
_ROWS = 128  # of a buffer, at least: recordings for other numbers of rows use the same memory
_BUFFERS = 4  # of one width, used in turn: a layer still reads a result two operations later
_LINE_BYTES = 64
T = TypeVar("T")
SCHED_YIELD = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


class Recording(Generic[T]):
    """Recorded calls of kernels, and the result that they compute."""

    def __init__(self, pointers: Sequence[int]) -> None:
        """pointers: addresses of the inputs, all different. In later runs, arguments equal to one of them get its new
        value.
        """
        assert len(set(pointers)) == len(pointers)
        self._pointers = list(pointers)
        self._calls = bytearray()
        self._num_empties: dict[tuple[int, torch.dtype], int] = {}

    def add(self, *words: int) -> None:
        """Records a call: the kernel's address and its arguments."""
        self._calls += _packing(len(words)).pack(*words)

    def empty(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Returns memory for a result, [rows, width], which is overwritten by the fourth next result of this width.

        Rows that are read together are so far apart that they have different places in the cache.
        """
        number = self._num_empties.get((width, dtype), 0)
        self._num_empties[width, dtype] = number + 1
        return _buffer(number % _BUFFERS, -(-rows // _ROWS) * _ROWS, width, dtype)[:rows]

    def finish(self, result: T) -> None:
        """Ends the recording: all calls are there."""
        self.result = result
        self._words = np.frombuffer(self._calls, dtype=np.int64).reshape(-1, _CALL_WORDS)
        flat = self._words.reshape(-1)
        self._places = [np.flatnonzero(flat == pointer) for pointer in self._pointers]

    def rewind(self, pointers: Sequence[int]) -> None:
        """Resets the counters of all calls, and sets other inputs."""
        flat = self._words.reshape(-1)
        for places, pointer in zip(self._places, pointers, strict=True):
            flat[places] = pointer
        self._words[:, 1 + ITEM_COUNTER] = 0
        self._words[:, 1 + THREAD_COUNTER] = 0
        self._words[:, _BEGAN:] = 0

    def argument(self, num_threads: int) -> Any:
        """Makes the argument of `make_program`'s function, to be called by so many threads."""
        words, stride = self._words.ctypes.data, _CALL_WORDS * 8
        return (ctypes.c_int64 * 5)(len(self._words), words, stride, SCHED_YIELD, num_threads > 1)


class RowBlocks:
    """Recorded calls of kernels that compute each row of their results from the same row of their inputs."""

    def __init__(self, rows: int, rows_at_once: int, max_threads: int) -> None:
        self.rows_at_once = rows_at_once
        self._max_threads = max_threads
        self._num_blocks = -(-rows // rows_at_once)
        self._calls = bytearray()
        self._empties: list[Tensor] = []  # kept until the calls have run

    def add(self, *words: int) -> None:
        """Records a call: the kernel's address and its arguments. The call takes the items of one block at a time."""
        self._calls += _packing(len(words)).pack(*words)

    def empty(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Returns memory like `empty_rows`, with room for a whole block of each thread."""
        whole = empty_rows(max(rows, self._max_threads * self.rows_at_once), width, dtype)
        self._empties.append(whole)
        return whole[:rows]

    def at_a_time(self, num_items: int) -> int:
        """Returns how many of a kernel's items are a block. There is an item for each row or for each block."""
        return 1 if num_items == self._num_blocks else self.rows_at_once

    def argument(self, results: Sequence[Tensor]) -> Any:
        """Makes the argument of `make_row_program`'s function. results: the tensors that are read afterwards.

        In all other tensors of these calls a thread uses the same rows for all its blocks; so they stay in its cache.
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
    """Makes a C function of a pointer to int64. Each thread takes a block of rows, makes all calls for it, and takes
    the next.

    Arguments: number of calls; their address; the address of as many words, the shifts: a shift is added to a call's
    word for each number by which the thread is above the block; memory for one call for each thread; number of blocks;
    number of threads; two counters.
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
    """Makes a C function of a pointer to int64. Each thread makes all calls.

    Arguments: number of calls; their address, and bytes from one to the next; the address of sched_yield; 1 if threads
    offer their cores between calls, else 0.

    A call ends when all its items are done. It does not wait for a thread that took no item because another process has
    its core. Several threads offer their cores between calls: otherwise the other process would wait, and then take a
    core in the middle of an item, for which all threads wait. One thread keeps its core: nobody waits for its items,
    and on Linux 6.18 a thread that offers its core gets less of the core's time from then on. Beside a step of prompts,
    a step that decodes 1 to 59 sequences by one thread took 80 to 185 ms with these offers, and 22 to 94 without.
    """

    def program(a: Any) -> None:
        for number in range(a[0]):
            at = a[1] + number * a[2]
            began, ended = long_pointer(at + _BEGAN * 8), long_pointer(at + _ENDED * 8)
            fetch_add(began, 1)
            call_at(long_pointer(at)[0], at + 8)  # when it returns, all items are taken
            fetch_add(ended, 1)
            if a[4] != 0:
                call_at(a[3], 0)
            tries = 0
            while True:
                num_ended = load_acquire(ended)  # read before `began`, or a thread that found no item would count
                if num_ended == load_acquire(began):
                    break
                tries += 1
                if tries % _TRIES == 0:
                    call_at(a[3], 0)
                pause()

    return program


def empty_rows(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Returns memory, [rows, width]. Rows of whole cache lines begin an odd number of lines apart.

    With an even number, rows would share places in the caches; with a power of 2, all would share one of 64 places:
    64-byte stores to rows 8,192 bytes apart made a matrix product take twice its time.
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
