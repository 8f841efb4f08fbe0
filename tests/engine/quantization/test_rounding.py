"""Matrices made into codes: how far the numbers may be from what they were, and that shares are those of the whole."""

import numpy as np
import pytest
import torch
from torch import Tensor

from services.engine.quantization.codes import Code, Inputs
from services.engine.quantization.rounding import to_int4, to_int8


def matrix(out: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    numbers = torch.randn(out, depth, generator=torch.Generator().manual_seed(out))
    numbers[0] = 0
    numbers[-1] += 3  # none of them is near zero
    return numbers.to(dtype)


@pytest.mark.parametrize("depth", [1, 31, 32, 33, 160])
def test_int8_is_within_half_a_step_of_each_row(depth: int) -> None:
    weight = matrix(5, depth)
    found = to_int8(weight)
    assert (found.code, found.inputs, found.group, found.offsets) == (Code.INT8, Inputs.INT8, depth, None)
    rows = weight.to(torch.float64).numpy()
    steps = np.abs(rows).max(axis=1, keepdims=True) / 127
    assert (np.abs(found.numbers(torch.float32).numpy() - rows) <= steps * 0.50001).all()
    assert not found.numbers(torch.float32)[0].any()


@pytest.mark.parametrize("depth", [1, 31, 32, 33, 160])
def test_int4_is_within_half_a_step_of_each_group(depth: int) -> None:
    """And float16's rounding of its ends."""
    weight = matrix(5, depth)
    found = to_int4(weight)
    assert (found.code, found.inputs, found.group) == (Code.UINT4, Inputs.AS_THEY_ARE, 32)
    assert found.scales.dtype == torch.float16
    rows, made = weight.to(torch.float64).numpy(), found.numbers(torch.float64).numpy()
    for first in range(0, depth, 32):
        group = rows[:, first : first + 32]
        low, high = group.min(axis=1, keepdims=True), group.max(axis=1, keepdims=True)
        bound = (high - low) / 15 / 2 + np.maximum(abs(low), abs(high)) * 2**-9
        assert (np.abs(made[:, first : first + 32] - group) <= bound).all()
    assert not made[0].any()


def test_what_is_beyond_float16_has_wide_scales() -> None:
    weight = matrix(5, 64, torch.float32) * 1e30
    found = to_int4(weight)
    assert found.scales.dtype == torch.float32
    error = (found.numbers(torch.float32) - weight).abs().max() / weight.abs().max()
    assert error < 1 / 15
