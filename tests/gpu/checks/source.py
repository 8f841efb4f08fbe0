"""Random cases: their source of randomness, and their names."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from tests.gpu.checks.result import Check

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Source:
    """The randomness of one case."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.choices = random.Random(seed)
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Makes normally distributed numbers."""
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def num_rows(self) -> int:
        """Chooses one, some, or, where that is quick, many rows."""
        many = 20 if self.device.type == "cpu" else 3000
        return self.choices.choice((1, 2, 7, many))


def cases(case: Callable[[Source, str], list[Check]], device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """Runs `num_cases` cases, each with its own source and its name, and returns all their checks."""
    return [
        found
        for index in range(num_cases)
        for found in case(Source(device, seed * 1000 + index), f"seed {seed}.{index}")
    ]
