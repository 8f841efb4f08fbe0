"""The peak rates of this machine: multiplying and adding on all cores, and copying memory."""

import time
from collections.abc import Callable

import numpy as np
import torch

from services.engine.kernels.cpu.amx.tiles import tile_config
from services.engine.kernels.cpu.peak import make_multiply_adds, operations_of_round
from services.engine.kernels.cpu.team import the_team

_ROUNDS, _ITEMS = 200_000, 8  # of each thread
_RUNS = 12
_COPIED_BYTES = 1 << 29


def peak_flops(dtype: str) -> float:
    """Measures operations a second, two for a multiply-add, of the class of processors that kernels are made for."""
    kernel, team = make_multiply_adds(dtype), the_team()
    config, memory = tile_config(), np.zeros(128, dtype=np.uint8)
    items = _ITEMS * team.num_threads
    arguments = _ROUNDS, memory.ctypes.data, config.ctypes.data
    seconds = _shortest_s(lambda: team.run(kernel, items, *arguments, at_a_time=1))
    return operations_of_round(dtype) * _ROUNDS * items / seconds


def copy_rate() -> float:
    """Measures the bytes a second that all threads read and write in memory that is in no cache."""
    source, target = torch.ones(_COPIED_BYTES // 4), torch.ones(_COPIED_BYTES // 4)
    return 2 * _COPIED_BYTES / _shortest_s(lambda: target.copy_(source))


def _shortest_s(run: Callable[[], object]) -> float:
    """Measures the shortest of some runs: other work of the machine only makes them longer."""
    run()
    times = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
