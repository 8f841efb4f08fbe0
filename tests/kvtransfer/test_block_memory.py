"""What every place for a pool of blocks must do: bytes come out of it, and go into it, as if its blocks were laid end
to end in the order in which they are named.
"""

import threading

import numpy as np
import pytest
import torch

from kvtransfer.block_memory import BlockMemory, GroupBlocks
from kvtransfer.block_ranges import RangesOf
from kvtransfer.regions import Region
from kvtransfer.transports.base import Memory
from services.engine.runner.gpu.device_blocks import _STAGING_BYTES, DeviceBlocks
from tests.kvtransfer.kv_source import Place, content, make_blocks

NUM_BLOCKS = 12
SIZES = [1, 7, 4096, _STAGING_BYTES // 3, _STAGING_BYTES + 1]  # bytes of a block


@pytest.fixture(params=["HOST", "TENSOR", "GROUP"])
def place(request: pytest.FixtureRequest) -> Place:
    return Place[request.param]


def random_bytes(seed: int, block_bytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, block_bytes), dtype=np.uint8)


def some_range(random: np.random.Generator, block_bytes: int) -> tuple[np.ndarray, int, int]:
    """Blocks, scattered, and a piece of them that is not empty."""
    blocks = random.permutation(NUM_BLOCKS)[: random.integers(1, NUM_BLOCKS)].astype(np.uint32)
    start, end = sorted(random.choice(blocks.size * block_bytes + 1, 2, replace=False))
    return blocks, int(start), int(end)


def whole(pool: BlockMemory) -> np.ndarray:
    return content(Memory(pool, np.zeros(NUM_BLOCKS, dtype=np.uint64)))


@pytest.mark.parametrize("block_bytes", SIZES)
def test_any_piece_of_any_blocks_is_read(place: Place, block_bytes: int):
    array, random = random_bytes(1, block_bytes), np.random.default_rng(2)
    pool = make_blocks(array.copy(), place)
    assert (pool.num_blocks, pool.block_bytes) == array.shape
    for _ in range(20):
        blocks, start, end = some_range(random, block_bytes)
        assert pool.read(blocks, start, end) == array[blocks].tobytes()[start:end]


@pytest.mark.parametrize("block_bytes", SIZES)
def test_what_is_written_lands_in_its_place_and_nowhere_else(place: Place, block_bytes: int):
    expected, random = random_bytes(3, block_bytes), np.random.default_rng(4)
    pool = make_blocks(expected.copy(), place)
    for _ in range(20):
        blocks, start, end = some_range(random, block_bytes)
        data = random.bytes(end - start)
        pool.write(blocks, start, data)
        laid = expected[blocks].reshape(-1)
        laid[start:end] = np.frombuffer(data, np.uint8)
        expected[blocks] = laid.reshape(blocks.size, block_bytes)
        assert np.array_equal(whole(pool), expected)


def test_threads_read_and_write_at_once(place: Place):
    """Each thread has blocks of its own, and finds in them what it wrote last."""
    block_bytes, num_threads = 5000, 4
    pool = make_blocks(random_bytes(5, block_bytes), place)
    failed: list[int] = []

    def use(number: int) -> None:
        pool.bind_thread()
        mine = np.arange(number, NUM_BLOCKS, num_threads, dtype=np.uint32)
        random = np.random.default_rng(number)
        for _ in range(150):
            data = random.bytes(mine.size * block_bytes)
            pool.write(mine, 0, data)
            if pool.read(mine, 0, len(data)) != data:
                failed.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


@pytest.mark.parametrize("place", [Place.HOST, Place.TENSOR])
def test_a_pool_of_whole_blocks_is_one_region(place: Place):
    array = random_bytes(6, 64)
    pool = make_blocks(array, place)
    assert pool.regions == (Region(array.ctypes.data, 64, 0, 64),)
    assert pool.device is None


def test_a_pool_made_in_inference_mode_takes_blocks():
    """As runners make theirs; transports copy outside of it."""
    with torch.inference_mode():
        pool = DeviceBlocks(torch.zeros(4, 64, dtype=torch.uint8))
    pool.write(np.array([2], dtype=np.uint32), 0, b"x" * 64)
    assert pool.read(np.array([1, 2], dtype=np.uint32), 0, 128) == bytes(64) + b"x" * 64


RANGES = {
    "all": [range(300)],
    "one": [range(40, 41)],
    "several": [range(3, 50), range(50, 60), range(200, 300)],
}


@pytest.mark.parametrize("ranges", RANGES)
def test_ranges_of_blocks_are_a_pool_of_shorter_blocks(place: Place, ranges: str):
    array, random = random_bytes(7, 300), np.random.default_rng(8)
    pool = make_blocks(array.copy(), place)
    view = RangesOf(pool, RANGES[ranges])
    columns = np.concatenate([np.arange(own.start, own.stop) for own in RANGES[ranges]])
    assert (view.num_blocks, view.block_bytes) == (NUM_BLOCKS, len(columns))
    for _ in range(20):
        blocks, start, end = some_range(random, len(columns))
        assert view.read(blocks, start, end) == array[np.ix_(blocks, columns)].tobytes()[start:end]
        data = random.bytes(end - start)
        view.write(blocks, start, memoryview(data))
        laid = array[np.ix_(blocks, columns)].reshape(-1)
        laid[start:end] = np.frombuffer(data, np.uint8)
        array[np.ix_(blocks, columns)] = laid.reshape(blocks.size, len(columns))
        assert np.array_equal(whole(pool), array)


def part_of_blocks() -> tuple[np.ndarray, GroupBlocks]:
    """Bytes 10 to 40 and 70 to 90 of blocks of 100, in two pools that both have 20 to 30."""
    array = random_bytes(9, 100)
    ranges = [[range(10, 30), range(70, 90)], [range(20, 40)]]
    pools = [np.concatenate([array[:, own.start : own.stop] for own in each], axis=1) for each in ranges]
    return array, GroupBlocks(pools, ranges, block_bytes=100)


def test_a_part_of_every_block_is_read_and_written_where_it_is():
    array, pool = part_of_blocks()
    assert (pool.num_blocks, pool.block_bytes) == array.shape
    view, blocks = RangesOf(pool, [range(12, 40), range(80, 90)]), np.array([5, 2], dtype=np.uint32)
    columns = np.r_[12:40, 80:90]
    assert view.read(blocks, 0, 2 * len(columns)) == array[np.ix_(blocks, columns)].tobytes()
    view.write(blocks, 0, bytes(2 * len(columns)))
    array[np.ix_(blocks, columns)] = 0
    assert np.array_equal(pool.pools[0], np.concatenate([array[:, 10:30], array[:, 70:90]], axis=1))
    assert np.array_equal(pool.pools[1], array[:, 20:40])


@pytest.mark.parametrize("missing", [range(9, 12), range(39, 41), range(50, 60), range(5, 5), range(10, 80)])
def test_bytes_of_other_processes_are_no_ranges_of_a_part(missing: range):
    with pytest.raises(ValueError, match="not in this pool"):
        RangesOf(part_of_blocks()[1], [range(20, 30), missing])
