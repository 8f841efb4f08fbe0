"""What a runner needs of a device beside kernels: copies that nobody waits for, and steps that are recorded once.

What is started on a device runs in the order in which it was started. `CudaDevice` is a GPU; `HostDevice` is this
machine's memory, where everything has run when the call returns: Triton's interpreter in its place runs the same steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Mark(Protocol):
    """What was started on a device up to a moment."""

    def wait(self) -> None:
        """Returns when it has run. Raises what made it fail."""


class Fetched(Protocol):
    """Tensors on their way to the host."""

    def arrays(self) -> list[np.ndarray]:
        """Waits for them. Raises what made the device fail."""

    def hold_back(self) -> None:
        """What is started from now on runs when they were copied, and so may overwrite them."""


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Kernels that were recorded; `replay` starts them again, on the same memory."""

    replay: Callable[[], None]
    output: Tensor  # what they write


class Device(Protocol):
    """One device, used by one thread at a time. Each binds itself first."""

    torch: torch.device
    num_multiprocessors: int

    def bind_thread(self) -> None:
        """What this thread starts goes to this device."""

    def host_bytes(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes] on the host, from which the device copies by itself."""

    def mark(self) -> Mark:
        """All that was started until now."""

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Starts to copy what these hold once all that was started until now has run. Later work does not wait."""

    def recorder(self) -> "Recorder":
        """For recordings that are let go of together."""


class Recorder(Protocol):
    """Records kernels; its recordings share memory, so one is replayed at a time."""

    def record(self, body: Callable[[], Tensor]) -> Recorded:
        """Runs `body`, which only starts kernels, and records it. It must use no host memory."""


def _sleeping_event() -> "torch.cuda.Event":
    """One for which a thread sleeps. For any other it would keep a core busy, as long as a step takes."""
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
    """A GPU. Work goes to the current stream, copies to the host to one of their own."""

    def __init__(self, index: int = 0) -> None:
        self.torch = torch.device("cuda", index)
        self.bind_thread()
        self.num_multiprocessors: int = torch.cuda.get_device_properties(self.torch).multi_processor_count
        self._copies = torch.cuda.Stream()

    def bind_thread(self) -> None:
        """See Device."""
        torch.cuda.set_device(self.torch)

    def host_bytes(self, num_bytes: int) -> Tensor:
        """See Device. Pinned."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Mark:
        """See Device."""
        event = _sleeping_event()
        event.record()
        return _Event(event)

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """See Device."""
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
        """See Device."""
        return _GraphRecorder()


class _GraphRecorder:
    """CUDA graphs. Stream and memory are one recorder's own: with a graph go the workspaces of libraries on its stream,
    which other graphs on that stream would still use.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, body: Callable[[], Tensor]) -> Recorded:
        """See Recorder. `body` runs once before, which compiles kernels and sets up libraries; captures wait for it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            body()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile, for their own streams.
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            output = body()
        return Recorded(graph.replay, output)


class _Over:
    """Everything has run already."""

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

    num_multiprocessors = 2  # one after the other; work is split as on a GPU

    def __init__(self) -> None:
        self.torch = torch.device("cpu")

    def bind_thread(self) -> None:
        """The host's memory is there for every thread."""

    def host_bytes(self, num_bytes: int) -> Tensor:
        """See Device."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mark(self) -> Mark:
        """See Device."""
        return _Over()

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """See Device."""
        return _Copied([tensor.clone().numpy() for tensor in tensors])

    def recorder(self) -> "Recorder":
        """See Device."""
        return _RunAgain()


class _RunAgain:
    """Records nothing: each replay runs `body` again."""

    def record(self, body: Callable[[], Tensor]) -> Recorded:
        """See Recorder."""
        output = body()

        def replay() -> None:
            output.copy_(body())

        return Recorded(replay, output)
