"""Products in int8 are those of integers, with a scale for each row and each column."""

import math
from dataclasses import replace

import pytest
import torch

from services.engine.kernels.cpu.int8_linear import Int8Linear, can_multiply
from services.engine.kernels.cpu.int8_matmul import MOST_DEPTH
from services.engine.kernels.cpu.scratch import scratch_memory
from services.engine.kernels.cpu.team import the_team
from services.engine.quantization.codes import Code, Inputs
from tests.engine.kernels.int8_products import (
    DEEP_SHAPES,
    SHAPES,
    Weight,
    assert_product,
    random_rows,
    random_weight,
)
from tests.engine.kernels.test_packed_linear import assert_gated

BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
POISON = 0xFF  # bytes of scratch memory: -1, or NaN


@BOTH
def test_shapes_at_borders(dtype: torch.dtype) -> None:
    for number, (rows, columns, depth) in enumerate(SHAPES):
        weight = random_weight(columns, depth, has_bias=number % 2 == 0)
        linear, x = weight.linear(dtype), random_rows(rows, depth, dtype)
        scratch_memory(linear._kernels.scratch_bytes).fill(POISON)
        assert_product(linear(x), x, weight)
        if linear.can_gate:
            assert_gated(linear(x, gated=True), linear(x))


@BOTH
def test_depths_that_are_multiplied_in_parts(dtype: torch.dtype) -> None:
    for rows, columns, depth in DEEP_SHAPES:
        weight = random_weight(columns, depth)
        linear, x = weight.linear(dtype), random_rows(rows, depth, dtype)
        scratch_memory(linear._kernels.scratch_bytes).fill(POISON)
        assert_product(linear(x), x, weight)
        if linear.can_gate:
            assert_gated(linear(x, gated=True), linear(x))


@BOTH
def test_the_largest_sums_do_not_overflow(dtype: torch.dtype) -> None:
    """Every code is the largest there is, at the largest depth: partial sums with 128 added wrap around."""
    depth = MOST_DEPTH - 1
    codes = torch.full((3, depth), -128, dtype=torch.int8)
    codes[1] = 127
    weight = Weight(codes, torch.ones(3))
    x = torch.stack([torch.full((depth,), float(value)) for value in (-300, 300, -1)]).to(dtype)
    assert_product(weight.linear(dtype)(x), x, weight)


@BOTH
def test_halves_are_rounded_to_even(dtype: torch.dtype) -> None:
    """The largest number is 127, so that codes are the numbers rounded."""
    numbers = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 62.5, -63.5]
    rounded = [127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 62.0, -64.0]
    weight = Weight(torch.eye(len(numbers), dtype=torch.int8), torch.ones(len(numbers)))
    assert weight.linear(dtype)(torch.tensor([numbers], dtype=dtype)).tolist() == [rounded]


@BOTH
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_rows_with_numbers_that_are_not_finite_become_nan_and_others_stay(value: float, dtype: torch.dtype) -> None:
    """Only then a step notices them. In the last numbers, too, which are no whole vector."""
    weight = random_weight(64, 35)
    linear, x = weight.linear(dtype), random_rows(5, 35, dtype)
    before, gated_before = linear(x).clone(), linear(x, gated=True).clone()
    x[1, 3], x[3, 34] = value, value
    for gated, sound in ((False, before), (True, gated_before)):
        found = linear(x, gated=gated)
        assert found[[1, 3]].isnan().all()
        assert torch.equal(found[[0, 2, 4]], sound[[0, 2, 4]])


@BOTH
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-32])
def test_rows_of_zeros_and_of_tiny_numbers_leave_the_bias(size: float, dtype: torch.dtype) -> None:
    weight = random_weight(40, 24)
    assert weight.bias is not None
    x = torch.full((3, 24), size, dtype=dtype)
    x[1] = random_rows(1, 24, dtype)
    found = weight.linear(dtype)(x)
    assert torch.equal(found[[0, 2]], weight.bias.to(dtype).expand(2, -1))
    assert_product(found[1:2], x[1:2], weight)


@BOTH
def test_rows_that_lie_apart(dtype: torch.dtype) -> None:
    linear, x = random_weight(96, 44).linear(dtype), random_rows(20, 80, dtype)
    assert torch.equal(linear(x[:, 8:52]), linear(x[:, 8:52].contiguous()))


@BOTH
def test_rows_in_blocks_get_what_they_get_all_at_once(dtype: torch.dtype) -> None:
    linear, down = random_weight(256, 96).linear(dtype), random_weight(64, 128).linear(dtype)
    rows = 4 * 256 * the_team().num_threads + 7
    x = random_rows(rows, 96, dtype)
    found = the_team().by_rows(rows, 4096, lambda: down(linear(x, gated=True)))
    assert torch.equal(found, down(linear(x, gated=True)))


@BOTH
def test_recordings_multiply_other_inputs(dtype: torch.dtype) -> None:
    linear, down, key = random_weight(256, 96).linear(dtype), random_weight(64, 128).linear(dtype), object()
    for seed in range(3):
        x = random_rows(7, 96 + seed, dtype)[:, seed:].contiguous()
        found = the_team().replay(key, (x,), lambda x=x: down(linear(x, gated=True)))  # type: ignore[misc]
        assert torch.equal(found, down(linear(x, gated=True)))


@BOTH
def test_some_columns_of_a_product(dtype: torch.dtype) -> None:
    weight = random_weight(192, 50)
    linear, x = weight.linear(dtype), random_rows(30, 50, dtype)
    for begin, end in ((0, 96), (96, 192), (32, 64)):
        part = linear.columns(begin, end)
        assert part is not None
        assert torch.equal(part(x), linear(x)[:, begin:end])
    assert linear.columns(0, 80) is None
    assert linear.columns(16, 48) is None


@BOTH
def test_matrices_below_each_other(dtype: torch.dtype) -> None:
    """As Q, K and V, with scales in several dtypes; and one whose columns are not in the order of its inputs."""
    weight = random_weight(100, 48)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    upper, lower = weight.matrix(0, 33), weight.matrix(33)
    upper = replace(upper, codes=upper.codes[:, order], order=order)
    lower = replace(lower, scales=lower.scales.to(torch.bfloat16))
    scales = torch.cat([weight.scales[:33], weight.scales[33:].to(torch.bfloat16).float()])
    x = random_rows(9, 48, dtype)
    assert_product(Int8Linear([upper, lower], weight.bias, dtype)(x), x, replace(weight, scales=scales))


def test_what_it_does_not_multiply() -> None:
    matrix = random_weight(8, 32).matrix()
    assert can_multiply([matrix, matrix], torch.bfloat16)
    groups = replace(matrix, group=16, scales=matrix.scales.expand(-1, 2).contiguous())
    deep = replace(random_weight(1, MOST_DEPTH).matrix(), group=MOST_DEPTH)
    others = (
        replace(matrix, inputs=Inputs.AS_THEY_ARE),
        replace(matrix, code=Code.E4M3),
        replace(matrix, offsets=matrix.scales),
        groups,
        deep,
    )
    for other in others:
        assert not can_multiply([other], torch.bfloat16)
        assert not can_multiply([matrix, other], torch.bfloat16)
    assert not can_multiply([matrix], torch.float16)
