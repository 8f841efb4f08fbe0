"""Memory of the pool, as the kernel counts it."""

import numpy as np
import psutil

from kvtransfer.block_memory import HostBlocks
from services.engine.runner.memory import allocate, populate

SIZE = 96 << 20


def test_populated_memory_is_there_and_unchanged() -> None:
    resident = psutil.Process().memory_info().rss
    memory = allocate(SIZE)
    memory[SIZE // 2] = 7
    assert psutil.Process().memory_info().rss - resident < SIZE // 2
    assert populate(HostBlocks(memory.reshape(4, -1)))
    assert psutil.Process().memory_info().rss - resident > SIZE * 0.9
    assert np.flatnonzero(memory).tolist() == [SIZE // 2]
    assert memory[SIZE // 2] == 7
