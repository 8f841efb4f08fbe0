"""The card and one model at a time, which the parts of `python -m loadtest gpu` share within a process.

Models are imported when the first part asks for one: checks need less.
"""

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from loadtest.gpu.card import Card, measure_card
from loadtest.gpu.shapes import SHAPES
from services.engine.runner.gpu.device import CudaDevice, Device, HostDevice

if TYPE_CHECKING:
    from loadtest.gpu.bench_model import BenchModel


class Bench:
    """Makes the card's figures and models when the first part asks. Without a GPU there is only a device for checks."""

    def __init__(self, seed: int) -> None:
        self.seed = seed  # of random cases
        self._model: BenchModel | None = None

    @cached_property
    def device(self) -> Device:
        """The GPU; the CPU where there is none."""
        return CudaDevice() if torch.cuda.is_available() else HostDevice()

    @cached_property
    def card(self) -> Card:
        """The card's measured rates."""
        return measure_card()

    def model(self, name: str) -> "BenchModel":
        """Returns the model of one of `SHAPES`, and frees the one before."""
        from loadtest.gpu.bench_model import load

        if self._model is None or self._model.name != name:
            self.free_model()
            self._model = load(name, SHAPES[name], self.device)
        return self._model

    def free_model(self) -> None:
        """Frees the memory of the model."""
        from loadtest.gpu.bench_model import free_memory

        self._model = None
        free_memory(self.device.torch)
