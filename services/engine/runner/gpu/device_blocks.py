"""A pool of KV blocks in the memory of a torch device, for transports that send and receive bytes.

Copies go through a small pinned buffer on a stream of their own, so they run beside the model's steps and wait for
none; `kvtransfer.block_memory` says why they need not. A copy waits for that stream alone, and releases the interpreter
lock meanwhile.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock

import numpy as np
import torch

from kvtransfer.block_memory import spans
from kvtransfer.regions import one_region

_STAGING_BYTES = 1 << 20  # pieces of a byte stream are smaller


class DeviceBlocks:
    """`BlockMemory` over a tensor. It has a stream and a buffer of its own, so a runner makes one and keeps it."""

    def __init__(self, pool: torch.Tensor) -> None:
        """pool: uint8[num_blocks, block_bytes], contiguous; it stays in place."""
        assert pool.dtype == torch.uint8
        assert pool.is_contiguous()
        self.pool = pool
        self.num_blocks, self.block_bytes = pool.shape
        self.regions = one_region(pool.data_ptr(), self.block_bytes)
        self.device: int | None = pool.device.index if pool.is_cuda else None
        self._flat = pool.view(-1)
        self._lock = Lock()  # for the following fields
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None
        self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=pool.is_cuda)
        self._staged: np.ndarray = self._staging.numpy()  # the same memory
        if pool.is_cuda:
            torch.cuda.synchronize(pool.device)  # the pool must be cleared before the first block is written

    def bind_thread(self) -> None:
        """See `BlockMemory.bind_thread`. Uses the device: choosing device 0 alone would do nothing."""
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)
            self._stream.synchronize()

    def read(self, blocks: np.ndarray, start: int, end: int) -> bytes:
        """See `BlockMemory.read`."""
        steps = range(start, end, _STAGING_BYTES)
        return b"".join(self._read(blocks, at, min(at + _STAGING_BYTES, end)) for at in steps)

    def write(self, blocks: np.ndarray, start: int, data: bytes | memoryview) -> None:
        """See `BlockMemory.write`."""
        source = np.frombuffer(data, dtype=np.uint8)
        for at in range(0, len(source), _STAGING_BYTES):
            self._write(blocks, start + at, source[at : at + _STAGING_BYTES])

    def _read(self, blocks: np.ndarray, start: int, end: int) -> bytes:
        with self._lock:
            with self._copying():
                for there, here in spans(blocks, self.block_bytes, start, end):
                    self._staging[here].copy_(self._flat[there], non_blocking=True)
            return self._staged[: end - start].tobytes()

    def _write(self, blocks: np.ndarray, start: int, source: np.ndarray) -> None:
        with self._lock:
            self._staged[: len(source)] = source
            with self._copying():
                for there, here in spans(blocks, self.block_bytes, start, start + len(source)):
                    self._flat[there].copy_(self._staging[here], non_blocking=True)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Runs copies that are started inside on the pool's stream. They are complete on exit, also after
        an exception.
        """
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())  # the pool may have been made in this mode
            if self._stream is not None:
                stack.callback(self._stream.synchronize)
                stack.enter_context(torch.cuda.stream(self._stream))
            yield
