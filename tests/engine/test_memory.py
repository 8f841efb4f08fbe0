"""Memory of the pool, as the kernel counts it."""

import numpy as np
import psutil
import torch

from kvtransfer.block_memory import GroupBlocks, HostBlocks
from services.engine.kernels.cpu.huge_pages import WeightMemory, allocate
from services.engine.runner.memory import populate

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


def test_pages_of_every_ranks_pool_are_populated_for_the_blocks_that_are_named() -> None:
    """Blocks 1 and 2 of four, of which one rank has a third and the other the rest."""
    third = SIZE // 3 // 4
    pools = [allocate(4 * third).reshape(4, third), allocate(8 * third).reshape(4, 2 * third)]
    group = GroupBlocks(pools, [[range(third, 2 * third)], [range(third), range(2 * third, 3 * third)]])
    resident = psutil.Process().memory_info().rss
    assert populate(group, 3 * third, 9 * third)
    added = psutil.Process().memory_info().rss - resident
    assert SIZE * 0.45 < added < SIZE * 0.55
    assert populate(group)
    assert psutil.Process().memory_info().rss - resident > SIZE * 0.9
    assert not any(pool.any() for pool in pools)


def test_weights_lie_beside_each_other_on_borders_of_cache_lines() -> None:
    memory = WeightMemory()
    shapes = [(3, 5), (1 << 20, 16), (1 << 20, 32), (7,)]
    weights = [memory.empty(torch.Size(shape), torch.bfloat16) for shape in shapes]
    for number, weight in enumerate(weights):
        weight.fill_(number)
    assert [weight.shape for weight in weights] == shapes
    assert [weight.data_ptr() % 64 for weight in weights] == [0] * 4
    assert weights[1].data_ptr() == weights[0].data_ptr() + 64
    assert all(bool((weight == number).all()) for number, weight in enumerate(weights)), "none overlaps another"
