# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Casts that kernels make of their own."""

import torch
import triton
import triton.language as tl

from services.engine.kernels.gpu.casts import PAIR_SCALE, split_pairs


@triton.jit
def _split(pairs, first, second, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = split_pairs(tl.load(pairs + at))
    tl.store(first + at, a)
    tl.store(second + at, b)


def test_pairs_of_float8_are_split_exactly(device: torch.device) -> None:
    """All pairs but those with a NaN."""
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    numbers = numbers[~numbers.view(torch.float8_e4m3fn).isnan()]
    pairs = torch.cartesian_prod(numbers, numbers).contiguous()
    size = triton.next_power_of_2(len(pairs))
    padded = torch.zeros(size, 2, dtype=torch.uint8)
    padded[: len(pairs)] = pairs
    first, second = torch.empty(2, size, dtype=torch.float16, device=device)
    _split[(1,)](padded.to(device).view(torch.int16).view(-1), first, second, SIZE=size)
    expected = padded.view(torch.float8_e4m3fn).float() / PAIR_SCALE.value
    assert torch.equal(torch.stack([first, second], 1).float().cpu(), expected)
