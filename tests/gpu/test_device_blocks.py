"""A pool in a GPU's memory, as transports see it."""

import threading

import numpy as np
import pytest
import torch

from kvtransfer.transports.cuda_driver import CudaDriver
from services.engine.runner.gpu.device_blocks import _STAGING_BYTES, DeviceBlocks
from tests.machine import GPU, needs

pytestmark = needs(GPU)

NUM_BLOCKS = 12


def make_pool(block_bytes: int) -> DeviceBlocks:
    return DeviceBlocks(torch.randint(0, 256, (NUM_BLOCKS, block_bytes), dtype=torch.uint8, device="cuda"))


@pytest.mark.parametrize("block_bytes", [7, 4096, _STAGING_BYTES // 3, _STAGING_BYTES + 1])
def test_pieces_of_blocks_are_read_and_written_and_nothing_else(block_bytes: int):
    pool, random = make_pool(block_bytes), np.random.default_rng(1)
    expected = pool.pool.cpu().numpy()
    for _ in range(20):
        blocks = random.permutation(NUM_BLOCKS)[: random.integers(1, NUM_BLOCKS)].astype(np.uint32)
        start, end = (int(at) for at in sorted(random.choice(blocks.size * block_bytes + 1, 2, replace=False)))
        data = random.bytes(end - start)
        pool.write(blocks, start, data)
        assert pool.read(blocks, start, end) == data
        laid = expected[blocks].reshape(-1)
        laid[start:end] = np.frombuffer(data, np.uint8)
        expected[blocks] = laid.reshape(blocks.size, block_bytes)
        assert np.array_equal(pool.pool.cpu().numpy(), expected)


def test_a_pool_made_in_inference_mode_takes_blocks():
    with torch.inference_mode():
        pool = DeviceBlocks(torch.zeros(4, 64, dtype=torch.uint8, device="cuda"))
    pool.write(np.array([2], dtype=np.uint32), 0, b"x" * 64)
    assert pool.read(np.array([1, 2], dtype=np.uint32), 0, 128) == bytes(64) + b"x" * 64


def test_copies_wait_for_no_step():
    """Both are complete while the stream of the model's steps is still busy."""
    pool, blocks = make_pool(4096), np.arange(NUM_BLOCKS, dtype=np.uint32)
    data = pool.read(blocks, 0, NUM_BLOCKS * 4096)  # whatever is slow the first time
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # clock cycles: about a second
    step = torch.cuda.Event()
    step.record()
    pool.write(blocks, 0, data[::-1])
    assert pool.read(blocks, 0, len(data)) == data[::-1]
    assert not step.query(), "they waited for it"
    torch.cuda.synchronize()


def test_a_bound_thread_can_export_the_pool():
    """A new thread has no context of the driver, and choosing device 0 gives it none."""
    pool, exported = make_pool(1 << 20), list[bytes | None]()

    def export() -> None:
        pool.bind_thread()
        exported.append(CudaDriver().export(pool.regions[0].address))

    thread = threading.Thread(target=export)
    thread.start()
    thread.join()
    assert exported[0] is not None, "NIXL could not have it read by CUDA IPC"


def test_it_knows_where_it_is():
    pool = make_pool(64)
    assert pool.regions[0].address == pool.pool.data_ptr()
    assert pool.device == torch.cuda.current_device()
