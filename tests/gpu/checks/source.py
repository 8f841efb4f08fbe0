"""Random cases: what they are made of, and how they are told apart."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from tests.gpu.checks.result import Check

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Source:
    """What a case is made of."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.choices = random.Random(seed)
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Normally distributed."""
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def num_rows(self) -> int:
        """One, some, or, where that is quick, many."""
        many = 20 if self.device.type == "cpu" else 3000
        return self.choices.choice((1, 2, 7, many))


def cases(case: Callable[[Source, str], list[Check]], device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """What so many cases found, each of which gets its own source and is told its name."""
    return [
        found
        for index in range(num_cases)
        for found in case(Source(device, seed * 1000 + index), f"seed {seed}.{index}")
    ]
