"""How a step's index arrays reach the device: in one copy where the runner collects them, or each at once."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Staging(Protocol):
    """Where a backend leaves the arrays that its kernels read."""

    def put(self, array: np.ndarray, *, fixed: bool = False) -> Tensor:
        """A device tensor of the array's shape and dtype, which holds it once the step's kernels run.

        Its address is a multiple of 16 bytes. fixed: a graph reads it there, so it has the same address in all steps
        that put arrays of the same sizes before. Raises RuntimeError where there is no room for one that is fixed.
        """


class DirectStaging:
    """Copies each array at once, to wherever there is room: for steps outside of a graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def put(self, array: np.ndarray, *, fixed: bool = False) -> Tensor:
        """See `Staging.put`. The next step's arrays lie elsewhere: no graph may be made of such a step."""
        copy = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=self._device)
        return copy.copy_(torch.from_numpy(array))
