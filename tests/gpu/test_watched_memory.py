"""What kernels do to memory that is not theirs, or not theirs alone, is found where it is interpreted."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.gpu.checks.memory import watched_memory
from tests.machine import NO_GPU, needs

pytestmark = needs(NO_GPU)  # else kernels are not interpreted


@pytest.fixture(autouse=True)
def own_memory() -> None:
    """Not in these tests."""


def found_in(kernel: Any, grid: int, *args: Any) -> list[str]:
    with watched_memory() as found:
        kernel[(grid,)](*args)
    return [each.partition(": ")[2] for each in found]


@triton.jit  # type: ignore[untyped-decorator]
def move(target: tl.tensor, source: tl.tensor, shift: tl.tensor, size: tl.tensor, LANES: tl.constexpr) -> None:
    """Each program LANES numbers from where it is, by so much further on."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    tl.store(target + at + shift, tl.load(source + at, mask=at < size, other=0), mask=at < size)


@triton.jit  # type: ignore[untyped-decorator]
def read_back(numbers: tl.tensor, BARRIER: tl.constexpr) -> None:
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(numbers + at, at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(numbers + at, tl.load(numbers + at) + 1)


@triton.jit  # type: ignore[untyped-decorator]
def write_one(target: tl.tensor, value: tl.tensor) -> None:
    tl.store(target + tl.arange(0, 2) // 2, tl.arange(0, 2) * value)


@triton.jit  # type: ignore[untyped-decorator]
def write_twice(target: tl.tensor) -> None:
    """The second program as the first, and then something else."""
    tl.store(target, 1)
    tl.store(target, 1 + tl.program_id(0))


@triton.jit  # type: ignore[untyped-decorator]
def add_up(total: tl.tensor, other: tl.tensor) -> None:
    tl.atomic_add(total, 1.0)
    tl.load(other)


def test_what_is_inside_and_apart_is_fine() -> None:
    source, target = torch.ones(7), torch.zeros(7)
    assert found_in(move, 2, target, source, 0, 7, 4) == []
    assert found_in(move, 2, source, source, 0, 7, 4) == [], "each program changes its own"
    assert found_in(add_up, 5, torch.zeros(1), source) == []
    assert found_in(read_back, 2, torch.zeros(8), True) == []
    assert target.eq(1).all()


def test_reads_and_writes_outside_of_a_tensor_are_found() -> None:
    wide = torch.full((32,), 2.0)
    assert found_in(move, 2, torch.zeros(8), wide[8:15], 0, 8, 4) == ["read outside of its tensors"]
    assert found_in(move, 2, wide[8:15], torch.zeros(7), 1, 7, 4) == ["write outside of its tensors"]
    assert wide[8:16].tolist() == [2, 0, 0, 0, 0, 0, 0, 2], "and not carried out"
    assert found_in(move, 2, wide[:, None].expand(32, 2), torch.zeros(7), 25, 7, 4) == []


def test_indices_may_be_anywhere_in_their_memory() -> None:
    places = torch.zeros(32, dtype=torch.int32)
    target = torch.zeros(8, dtype=torch.int32)
    assert found_in(move, 2, target, places[8:15], 0, 8, 4) == []
    assert found_in(move, 2, places[8:15], target, 0, 8, 4) == ["write outside of its tensors"], "what is read may be"


def test_programs_that_depend_on_each_other_are_found() -> None:
    numbers = torch.arange(12.0)
    assert found_in(move, 2, numbers, numbers, 4, 8, 4) == ["a program reads what another writes"]
    assert found_in(move, 2, numbers, torch.ones(4), 0, 4, 4) == []
    overlapping = torch.as_strided(numbers, (2, 4), (0, 1))
    assert found_in(write_one, 1, overlapping, 1) == ["one store writes different values to one place"]
    assert found_in(write_one, 1, overlapping, 0) == []
    assert found_in(write_twice, 2, numbers) == ["two programs write different values to one place"]
    assert found_in(write_twice, 1, numbers) == []
    assert found_in(add_up, 2, numbers[:1], numbers[:1]) == [
        "a program reads what it has stored, without a barrier",
        "a program changes in one step what another reads or writes",
    ]
    assert found_in(read_back, 2, torch.zeros(8), False) == ["a program reads what it has stored, without a barrier"]
