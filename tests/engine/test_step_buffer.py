"""What a step needs on the device: in one copy, and where every step has it."""

import numpy as np
import pytest
import torch

from services.engine.runner.gpu.device import HostDevice
from services.engine.runner.gpu.step_buffer import StepBuffer


@pytest.fixture
def buffer() -> StepBuffer:
    buffer = StepBuffer(HostDevice())
    buffer.reserve(4096)
    return buffer


def test_arrays_are_there_once_they_were_copied(buffer: StepBuffer) -> None:
    arrays: list[np.ndarray] = [
        np.arange(5, dtype=np.int32),
        np.array([[1, -1], [2**40, -(2**40)]], dtype=np.int64),
        np.array([0.5, -0.0], dtype=np.float32),
        np.zeros((0, 3), dtype=np.int32),
    ]
    buffer.begin()
    found = [buffer.put(array) for array in arrays]
    buffer.copy()
    for tensor, array in zip(found, arrays, strict=True):
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.data_ptr() % 16 == 0 or not array.size


def test_what_is_fixed_is_where_it_was_or_an_error(buffer: StepBuffer) -> None:
    places = set()
    for length in (3, 300, 1):
        buffer.begin()
        buffer.put(np.zeros(30, dtype=np.int32), fixed=True)
        places.add(buffer.put(np.zeros(7, dtype=np.int64), fixed=True).data_ptr())
        buffer.put(np.zeros(length, dtype=np.int32), fixed=True)
        buffer.copy()
    assert len(places) == 1
    with pytest.raises(RuntimeError, match="4096 are reserved"):
        buffer.put(np.zeros(2000, dtype=np.int32), fixed=True)


def test_a_step_is_gathered_while_the_one_before_still_reads_its_own(buffer: StepBuffer) -> None:
    for step in range(4):
        buffer.begin()
        buffer.put(np.full(4, step, dtype=np.int32))
        buffer.copy()
    assert sorted(int(host[0]) for host in buffer._arrays) == [2, 3]


def test_what_finds_no_place_is_copied_on_its_own(buffer: StepBuffer) -> None:
    buffer.begin()
    small = buffer.put(np.arange(1000, dtype=np.int32))
    large = buffer.put(np.arange(2000, dtype=np.int32)[::2])
    buffer.copy()
    assert small[-1] == 999
    assert large[-1] == 1998
