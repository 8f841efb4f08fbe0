"""Index arrays that are copied to the device one by one, where no runner collects them."""

import numpy as np
import torch
from torch import Tensor


class DirectStaging:
    """Copies each array at once, to memory of its own: for steps outside of a graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def put(self, array: np.ndarray, *, fixed: bool = False) -> Tensor:
        """See `Staging.put`. The next step's arrays lie elsewhere: no graph may be made of such a step."""
        copy = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=self._device)
        return copy.copy_(torch.from_numpy(array))
