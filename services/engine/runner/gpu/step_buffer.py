"""The arrays of a step for the device, gathered on the host and copied there in one piece.

    host     [ ids | positions | ... | block tables | ... ]      two of these, used in turn
                              │ one copy
    device   [ ids | positions | ... | block tables | ... ]      one, always at the same address

A step's copy runs after the steps before it, so one piece of device memory is enough. The host needs two: while it
writes one, the copy of the previous step from the other may not have run yet. The copy before that one has, since its
step's results have been collected.
"""

import numpy as np
import torch
from torch import Tensor

from services.engine.runner.gpu.device import Device

_ALIGNMENT = 16  # bytes: kernels read whole vectors
_TORCH = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


class StepBuffer:
    """`Staging` of one copy per step: `begin`, any number of `put`, `copy`; then kernels may use the
    tensors of `put`.
    """

    def __init__(self, device: Device) -> None:
        """Makes a buffer without room: see `reserve`."""
        self._device = device
        self._turn = 0
        self._used = 0
        self.reserve(0)

    def reserve(self, num_bytes: int) -> None:
        """Makes room for so many bytes, once, before the first step."""
        self._hosts = [self._device.host_bytes(num_bytes) for _ in range(2)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._there = torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch)

    def begin(self) -> None:
        """Begins the next step. The caller has seen that the device ran all steps but the last one."""
        self._turn = 1 - self._turn
        self._used = 0

    def put(self, array: np.ndarray, *, fixed: bool = False) -> Tensor:
        """See `Staging.put`. Takes int32, int64 or float32. An array that finds no room and is not fixed is copied on
        its own.
        """
        at, end = self._used, self._used + array.nbytes
        if end > len(self._there):
            if fixed:
                raise RuntimeError(f"a step needs {end} bytes or more, {len(self._there)} are reserved")
            return torch.from_numpy(np.ascontiguousarray(array)).to(self._device.torch)
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        np.copyto(self._arrays[self._turn][at:end].view(array.dtype).reshape(array.shape), array)
        return self._there[at:end].view(_TORCH[array.dtype]).view(array.shape)

    def copy(self) -> None:
        """Starts the copy."""
        self._there[: self._used].copy_(self._hosts[self._turn][: self._used], non_blocking=True)
