"""Runs compiled kernels on all threads of the OpenMP team that torch's own operations use.

A second team would compete with torch's for the same cores. Threads take items from a shared counter, so a delayed
thread does not delay the others.
"""

import ctypes
import os
import struct
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from services.engine.kernels.base import BlockSizes, Rows
from services.engine.kernels.cpu.matmul import MOST_ROWS
from services.engine.kernels.cpu.openmp import OpenMP, loaded_openmp
from services.engine.kernels.cpu.per_item import NUM_HEADER
from services.engine.kernels.cpu.recording import Recording, RowBlocks, empty_rows, make_program, make_row_program

_MOST_AT_A_TIME, _TAKES = 16, 16
_MAX_RECORDINGS = 128
# Limits of a block of rows. All that kernels read and write of it, weights aside, should fit into the second-level
# cache; with too few rows, loading the weights from memory would take longer than the products. For 1,848 rows, blocks
# of 128 to 256 rows were within 3 % of each other.
_BLOCK_BYTES, _LEAST_ROWS, _ROWS_STEP = 3 << 19, 96, 16
Kernel = Any  # a MachineCode of `per_item`
T = TypeVar("T")


def rows_of_a_block(rows: int, row_bytes: int, num_threads: int) -> int | None:
    """Returns the rows of a block such that each thread has the same number of blocks; None: no blocks.

    Each thread gets two blocks or more, unless blocks then have too few rows.
    """
    most = min(MOST_ROWS, _BLOCK_BYTES // row_bytes)
    if most < _LEAST_ROWS:
        return None
    needed = -(-rows // (most * num_threads))  # blocks of each thread
    for blocks in (max(needed, 2), needed):
        rows_at_once = -(-rows // (blocks * num_threads * _ROWS_STEP)) * _ROWS_STEP
        if rows_at_once >= _LEAST_ROWS:
            return rows_at_once
    return None


def float_argument(value: float) -> int:
    """Packs a float64 into one of a kernel's int64 arguments."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


class Team:
    """The calling thread and its OpenMP threads."""

    def __init__(self) -> None:
        openmp = loaded_openmp()
        assert openmp is not None
        self._openmp: OpenMP = openmp
        self.max_threads = len(os.sched_getaffinity(0))
        self._program, self._row_program = make_program(), make_row_program()
        self._recordings: dict[Hashable, Recording[Any]] = {}
        self._recording: Recording[Any] | RowBlocks | None = None

    @property
    def rows_at_once(self) -> int | None:
        """Returns the rows of a block inside `by_rows`, else None."""
        return self._recording.rows_at_once if isinstance(self._recording, RowBlocks) else None

    @property
    def num_threads(self) -> int:
        """Returns how many threads run the next kernel."""
        return min(self.max_threads, self._openmp.num_threads)

    def run(self, kernel: Kernel, num_items: int, *arguments: int, at_a_time: int | None = None) -> None:
        """Calls the kernel once on each thread, and returns when all calls have returned. Other Python threads run
        meanwhile.

        at_a_time: items that a thread takes at once; None: chosen for many small items. Inside `by_rows` it is not
        used: the kernel has an item for each row or for each block of rows, and a thread takes those of a block.
        """
        if isinstance(self._recording, RowBlocks):
            at_a_time = self._recording.at_a_time(num_items)
        elif at_a_time is None:
            at_a_time = max(1, min(_MOST_AT_A_TIME, num_items // _TAKES))
        header = (0, num_items, at_a_time, 0, self.max_threads)
        if self._recording is not None:
            self._recording.add(kernel.address, *header, *arguments)
            return
        block = (ctypes.c_int64 * (NUM_HEADER + len(arguments)))(*header, *arguments)
        self._openmp.run(kernel.address, block)

    def replay(self, key: Hashable, inputs: Sequence[Tensor], body: Callable[[], T]) -> T:
        """Runs the kernels that `body` runs, all at once when `body` ends, and returns its result.

        `body` is called only if there is no recording with this key. It must run the same kernels for any inputs of the
        same shapes. All other memory that these kernels use must stay in place; memory of `empty` does.
        """
        pointers = [tensor.data_ptr() for tensor in inputs]
        recording: Recording[T] | None = self._recordings.pop(key, None)
        if recording is None:
            recording = self._record(pointers, body)
        else:
            recording.rewind(pointers)
        self._recordings[key] = recording  # in order of last use
        if len(self._recordings) > _MAX_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        self._openmp.run(self._program.address, recording.argument(self.num_threads))
        return recording.result

    def by_rows(self, rows: int, row_bytes: int, body: Callable[[], Rows], blocks: BlockSizes | None = None) -> Rows:
        """Runs the kernels that `body` runs, all for some rows before all for the next rows, and returns its result.

        row_bytes: bytes that the kernel with the widest rows reads and writes for each row. blocks: what the blocks of
        rows suit; None: this, and the threads that run.
        """
        sizes = blocks or BlockSizes(self.num_threads, row_bytes)
        rows_at_once = rows_of_a_block(rows, sizes.row_bytes, sizes.threads)
        if self._recording is not None or rows_at_once is None:
            return body()
        recording = self._recording = RowBlocks(rows, rows_at_once, self.max_threads)
        try:
            result = body()
        finally:
            self._recording = None
        results = (result,) if isinstance(result, Tensor) else tuple(result)
        self._openmp.run(self._row_program.address, recording.argument(results))
        return result

    def empty(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Returns memory like `empty_rows`. Inside `replay`, results that are made a little later use the same memory
        again.
        """
        if self._recording is not None:
            return self._recording.empty(rows, width, dtype)
        return empty_rows(rows, width, dtype)

    def _record(self, pointers: list[int], body: Callable[[], T]) -> "Recording[T]":
        self._recording = Recording(pointers)
        try:
            self._recording.finish(body())
            return self._recording
        finally:
            self._recording = None


@cache
def the_team() -> Team:
    """Returns this process's team."""
    return Team()
