"""The limits of this card: the rates at which it copies memory and multiplies large matrices.

The floors of all other measurements are computed from these two.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

_COPIED_BYTES = 4 << 30  # many times the largest cache
_MATRIX = 8192
_WARM_UP, _ROUNDS = 3, 20


@dataclass(frozen=True, slots=True)
class Card:
    """The card's size and rates, measured and not read off a data sheet."""

    name: str
    num_multiprocessors: int
    total_bytes: int
    bytes_per_s: float  # of a device-to-device copy, read and written ones counted
    flops_per_s: float  # of a large bfloat16 product of random numbers


def measure_card() -> Card:
    """Measures the card, in some two seconds."""
    properties = torch.cuda.get_device_properties(0)
    return Card(
        properties.name,
        properties.multi_processor_count,
        properties.total_memory,
        bytes_per_s=2 * _COPIED_BYTES / _copy_s(),
        flops_per_s=2 * _MATRIX**3 / _product_s(),
    )


def kernel_s(body: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Measures seconds on the device from the start of `body` to its end: the median of some runs, after others."""
    for _ in range(_WARM_UP):
        body()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start, end in marks:
        start.record()
        body()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([start.elapsed_time(end) for start, end in marks])) / 1e3


def _copy_s() -> float:
    source = torch.empty(_COPIED_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return kernel_s(lambda: target.copy_(source))


def _product_s() -> float:
    left, right = (torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(left)
    return kernel_s(lambda: torch.mm(left, right, out=out))
