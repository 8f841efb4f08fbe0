"""The seam between a runner and a device, kernels aside: copies without waiting, and steps that are recorded once.

A device runs all work in the order in which it was started. `CudaDevice` is a GPU. `HostDevice` is this machine's
memory, where all work has run when a call returns: with Triton's interpreter it runs the same steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Mark(Protocol):
    """A point in a device's work: all that was started before it."""

    def wait(self) -> None:
        """Returns when all work before the mark has run. Raises the error that made it fail."""


class Fetched(Protocol):
    """Tensors on their way to the host."""

    def arrays(self) -> list[np.ndarray]:
        """Waits for the tensors and returns them. Raises the error that made the device fail."""

    def hold_back(self) -> None:
        """Makes later work of the device wait until the tensors were copied, so that it may overwrite them."""


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Kernels that were recorded; `replay` starts them again, on the same memory."""

    replay: Callable[[], None]
    output: Tensor  # written by the kernels


class Device(Protocol):
    """One device. One thread uses it at a time; a thread binds itself first."""

    torch: torch.device
    num_multiprocessors: int

    def bind_thread(self) -> None:
        """Makes this device the one on which this thread starts work."""

    def host_bytes(self, num_bytes: int) -> Tensor:
        """Allocates uint8[num_bytes] on the host, from which the device copies without a wait on the host."""

    def mark(self) -> Mark:
        """Marks all work that was started so far."""

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Starts to copy these tensors as they are after all work that was started so far. Later work does not wait."""

    def recorder(self) -> "Recorder":
        """Makes a recorder, for recordings that are freed together."""


class Recorder(Protocol):
    """Records kernels. Its recordings share memory, so one is replayed at a time."""

    def record(self, body: Callable[[], Tensor]) -> Recorded:
        """Runs `body`, which only starts kernels, and records it. `body` must use no host memory."""


def _sleeping_event() -> "torch.cuda.Event":
    """Makes an event for which a thread sleeps. A wait for any other event keeps a core busy, as long as a
    step takes.
    """
    return torch.cuda.Event(blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Event:
    event: "torch.cuda.Event"

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True, slots=True, eq=False)
class _Copies:
    hosts: list[Tensor]
    done: "torch.cuda.Event"

    def arrays(self) -> list[np.ndarray]:
        self.done.synchronize()
        return [host.numpy() for host in self.hosts]

    def hold_back(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


class CudaDevice:
    """A GPU. Work goes to the current stream, copies to the host to a stream of their own."""

    def __init__(self, index: int = 0) -> None:
        self.torch = torch.device("cuda", index)
        self.bind_thread()
        self.num_multiprocessors: int = torch.cuda.get_device_properties(self.torch).multi_processor_count
        self._copies = torch.cuda.Stream()

    def bind_thread(self) -> None:
        """See `Device.bind_thread`."""
        torch.cuda.set_device(self.torch)

    def host_bytes(self, num_bytes: int) -> Tensor:
        """See `Device.host_bytes`. The memory is pinned."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Mark:
        """See `Device.mark`."""
        event = _sleeping_event()
        event.record()
        return _Event(event)

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """See `Device.fetch`."""
        ready, done = torch.cuda.Event(), _sleeping_event()
        ready.record()
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(ready)
            hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._copies)
            done.record()
        return _Copies(hosts, done)

    def recorder(self) -> "Recorder":
        """See `Device.recorder`."""
        return _GraphRecorder()


class _GraphRecorder:
    """Records CUDA graphs. Each recorder has a stream and memory of its own: libraries' workspaces belong to a stream
    and are freed with a graph, and other graphs on that stream would still use them.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, body: Callable[[], Tensor]) -> Recorded:
        """See `Recorder.record`. `body` runs once before the capture, to compile kernels and set up libraries."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            body()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile, for their own streams.
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            output = body()
        return Recorded(graph.replay, output)


class _Over:
    """A mark of work that has run already."""

    def wait(self) -> None:
        pass


@dataclass(frozen=True, slots=True, eq=False)
class _Copied:
    copies: list[np.ndarray]

    def arrays(self) -> list[np.ndarray]:
        return self.copies

    def hold_back(self) -> None:
        pass


class HostDevice:
    """The host's own memory; kernels run in Triton's interpreter."""

    num_multiprocessors = 2  # simulated one after the other, so that work is split as on a GPU

    def __init__(self) -> None:
        self.torch = torch.device("cpu")

    def bind_thread(self) -> None:
        """Does nothing: every thread has the host's memory."""

    def host_bytes(self, num_bytes: int) -> Tensor:
        """See `Device.host_bytes`."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mark(self) -> Mark:
        """See `Device.mark`."""
        return _Over()

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """See `Device.fetch`."""
        return _Copied([tensor.clone().numpy() for tensor in tensors])

    def recorder(self) -> "Recorder":
        """See `Device.recorder`."""
        return _RunAgain()


class _RunAgain:
    """A recorder that records nothing: each replay runs `body` again."""

    def record(self, body: Callable[[], Tensor]) -> Recorded:
        """See `Recorder.record`."""
        output = body()

        def replay() -> None:
            output.copy_(body())

        return Recorded(replay, output)
