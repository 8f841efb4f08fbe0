"""How a step's index arrays reach the device."""

from typing import Protocol

import numpy as np
from torch import Tensor


class Staging(Protocol):
    """Where a backend leaves the arrays that its kernels read."""

    def put(self, array: np.ndarray, *, fixed: bool = False) -> Tensor:
        """A device tensor of the array's shape and dtype, which holds it once the step's kernels run.

        Its address is a multiple of 16 bytes. fixed: a graph reads it there, so it has the same address in all steps
        that put arrays of the same sizes before. Raises RuntimeError where there is no room for one that is fixed.
        """
