"""Runs a compiled kernel on all threads of the OpenMP team that torch's own operations use.

A team of one's own would wait for work on the same cores as torch's. Threads take items from a counter that they share,
so one that is held up does not hold up the others.
"""

import ctypes
import os
import struct
from typing import Any

from services.engine.kernels.per_item import NUM_HEADER
from services.engine.openmp import OpenMP, loaded_openmp

_MOST_AT_A_TIME, _TAKES = 16, 16
Kernel = Any  # see per_item


def float_argument(value: float) -> int:
    """A float64 among a kernel's int64 arguments."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


class Team:
    """The calling thread and its OpenMP threads."""

    def __init__(self) -> None:
        openmp = loaded_openmp()
        assert openmp is not None
        self._openmp: OpenMP = openmp
        self.max_threads = len(os.sched_getaffinity(0))

    def run(self, kernel: Kernel, num_items: int, *arguments: int) -> None:
        """Calls the kernel once on each thread, and returns when all have. Other Python threads run meanwhile."""
        at_a_time = max(1, min(_MOST_AT_A_TIME, num_items // _TAKES))
        header = (0, num_items, at_a_time, 0, self.max_threads)
        block = (ctypes.c_int64 * (NUM_HEADER + len(arguments)))(*header, *arguments)
        self._openmp.run(kernel.address, block)
