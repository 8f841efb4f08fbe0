"""The seam through which a step's index arrays reach the device."""

from typing import Protocol

import numpy as np
from torch import Tensor


class Staging(Protocol):
    """Takes the arrays that a backend's kernels read."""

    def put(self, array: np.ndarray, *, fixed: bool = False) -> Tensor:
        """Returns a device tensor of the array's shape and dtype; it holds the array by the time that the step's
        kernels run.

        Its address is a multiple of 16 bytes. fixed: a graph reads the tensor, so its address is the same in all steps
        whose earlier arrays have the same sizes. Raises RuntimeError if there is no room for a fixed one.
        """
