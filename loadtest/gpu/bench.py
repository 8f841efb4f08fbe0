"""What the parts of `python -m loadtest.gpu` share within one process: the card, and one model at a time.

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
    """Each thing is made when the first part asks. Without a GPU there is nothing but the device to run checks on."""

    def __init__(self, seed: int) -> None:
        self.seed = seed  # of random cases
        self._model: BenchModel | None = None

    @cached_property
    def device(self) -> Device:
        """A GPU where there is one."""
        return CudaDevice() if torch.cuda.is_available() else HostDevice()

    @cached_property
    def card(self) -> Card:
        """What it can do."""
        return measure_card()

    def model(self, name: str) -> "BenchModel":
        """One of `SHAPES`. The model before is given up."""
        from loadtest.gpu.bench_model import load

        if self._model is None or self._model.name != name:
            self.give_up_model()
            self._model = load(name, SHAPES[name], self.device)
        return self._model

    def give_up_model(self) -> None:
        """Frees its memory."""
        from loadtest.gpu.bench_model import give_up_memory

        self._model = None
        give_up_memory(self.device.torch)
