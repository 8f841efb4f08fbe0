"""Memory in which kernels keep what they compute with, for each thread. Nothing in it outlasts an item."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from services.engine.kernels.cpu.team import Team, the_team

LINE_BYTES = 64  # of a cache line


@cache
def scratch_memory(bytes_of_a_thread: int) -> np.ndarray:
    """Returns the memory of all threads, and some more. Kernels that ask for as much have the same."""
    return np.empty(the_team().max_threads * bytes_of_a_thread + LINE_BYTES, dtype=np.uint8)


def scratch(bytes_of_a_thread: int) -> int:
    """Returns the address of the threads' memory, on a border of cache lines."""
    return whole_lines(scratch_memory(bytes_of_a_thread).ctypes.data)


def whole_lines(num_bytes: int) -> int:
    """Returns a number of bytes, or an address, rounded up to whole cache lines."""
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def own_rows(team: Team, rows: int, num_bytes: int) -> Tensor:
    """Returns memory for what one product reads, uint8[rows, bytes]. Results never lie there: see `Recording.empty`."""
    return team.empty(rows, num_bytes, torch.uint8)
