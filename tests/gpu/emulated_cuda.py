"""A CUDA GPU as torch shows it, emulated on the CPU: asynchronous, with streams, graphs and a memory of its own.

Triton's interpreter shows what kernels compute. It does not show what happens when the host is ahead of them, since
there they have always run already. Here a tensor on the device is a `DeviceTensor`, and what is started waits in the
queue of a stream until the host waits for it. How far everything else has come then is the worst of two: not at all,
or as far as it may. So what the host does too early shows: it reads what is not there yet, or overwrites what has not
been read. What a GPU refuses is a `Violation`: tensors of host and device in one operation, waiting within a capture;
so is memory that is freed while a stream it was not made for has yet to use it.

Nothing is known of speed, of the order of things within a kernel or of drivers; memory is not cut into pieces. Modules
that patch torch are better imported before this is on.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # which torch itself imports late
import triton.runtime.interpreter as interpreter
from torch.utils import _pytree as pytree

DEVICE = torch.device("cuda", 0)
TOTAL_BYTES = 256 << 20
_FACTORIES = ("empty", "zeros", "ones", "full", "arange", "tensor", "rand", "randn", "randint")
_HOST_WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select")  # what comes of them depends on data

_torch_to, _torch_empty, _torch_tensor, _torch_generator = torch.Tensor.to, torch.empty, torch.tensor, torch.Generator


class Violation(AssertionError):
    """What a GPU refuses, or what goes wrong on one now and then."""


class Order(Enum):
    """What has run when the host has waited for a moment of a stream, beside all that has to come before."""

    LATE = "nothing"
    EARLY = "everything; before that moment, all that need not come after it"


# ---- What waits in a stream


@dataclass(frozen=True, eq=False)
class Work:
    """A kernel or a copy."""

    run: Callable[[], object]
    uses: frozenset[int] = frozenset()  # allocations


@dataclass(eq=False)
class Moment:
    """An event that was recorded."""

    stream: "Stream"
    passed: bool = False


@dataclass(frozen=True, eq=False)
class Wait:
    """What follows runs after a moment of another stream."""

    moment: Moment


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device: object = None) -> None:
        self.device = DEVICE
        self.queue: deque[Work | Moment | Wait] = deque()
        _card().streams.append(self)

    def finish(self) -> None:
        """Runs all that is in it."""
        moment = Moment(self)
        _card().enqueue(self, moment)
        _card().host_waits_for(moment)

    def synchronize(self) -> None:
        """Of torch, as all that follow."""
        _card().waits.append("busy: for a stream")
        self.finish()

    def wait_event(self, event: "Event") -> None:
        if event.moment is not None:
            _card().enqueue(self, Wait(event.moment))

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    """torch.cuda.Event."""

    def __init__(self, blocking: bool = False) -> None:
        self._sleeps = blocking
        self.moment: Moment | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.moment = Moment(stream or _current_stream())
        _card().enqueue(self.moment.stream, self.moment)

    def synchronize(self) -> None:
        _card().waits.append("asleep" if self._sleeps else "busy: for an event")
        if self.moment is not None:
            _card().host_waits_for(self.moment)


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.work: list[Work] = []
        self.made: list[DeviceTensor] = []  # memory that belongs to it, and to others of its pool
        self.has_lost = False  # memory that it uses, and that somebody else may have by now
        self.pool: object = None
        self.stream: Stream | None = None

    def replay(self) -> None:
        """What graphs of this pool computed before is lost."""
        if self.has_lost:
            raise Violation("a graph is replayed that uses memory which has been freed")
        made = [one.here for graph in _card().graphs if graph.pool is self.pool for one in graph.made]
        for work in (Work(lambda: _spoil(*made)), *self.work):
            _card().enqueue(_current_stream(), work)


# ---- Tensors


@dataclass(eq=False)
class _Allocation:
    """Shared by all views of it. Freed with the last of them."""

    key: int
    num_bytes: int
    streams: set[Stream]  # on which it is used


class DeviceTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor on the device. To torch it is one without data."""

    here: torch.Tensor  # where its data lies
    allocation: _Allocation
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: torch.Tensor, allocation: _Allocation) -> "DeviceTensor":
        """A tensor of the same shape and strides."""
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, here.stride(), here.storage_offset(), dtype=here.dtype, device="meta"
        )
        made.here, made.allocation = here, allocation
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """All operations on one come here."""
        return _card().dispatch(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        """As of any that is on a GPU; so is what follows."""
        return DEVICE

    @property
    def is_cuda(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return int(self.here.data_ptr())

    def record_stream(self, stream: Any) -> None:
        self.allocation.streams.add(stream)

    def to(self, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            return super().to("cpu", dtype or self.dtype)
        return super().to(dtype or self.dtype, copy=copy)

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __setitem__(self, index: Any, value: Any) -> None:
        if all(isinstance(one, int | slice | type(None) | type(...)) for one in _each(index)):
            target = self[index]  # a view
            target.copy_(value) if isinstance(value, torch.Tensor) else target.fill_(value)
        else:
            _card().put(self, index, value)

    def __repr__(self) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


# ---- The device


@dataclass(eq=False)
class Card:
    """The device: what was started on it, and when that runs."""

    order: Order
    run_kernel: Callable[..., None]  # Triton's, on tensors of the host
    streams: list[Stream] = field(default_factory=list)
    graphs: weakref.WeakSet[Graph] = field(default_factory=weakref.WeakSet)
    waits: list[str] = field(default_factory=list)  # of the host: "asleep", or what for
    violations: list[str] = field(default_factory=list)  # found where nothing can be raised
    captures: int = 0
    keys: Iterator[int] = field(default_factory=count)  # of allocations
    taken: int = 0  # bytes
    kept: int = 0  # bytes that nobody uses, and that torch keeps for whoever is next
    most_reserved: int = 0
    capturing: Graph | None = None
    pinned: dict[int, Any] = field(default_factory=dict)  # memory of the host by address, which nobody else gets
    local: threading.local = field(default_factory=threading.local)
    lock: Any = field(default_factory=threading.RLock)

    @property
    def free(self) -> int:
        """Bytes."""
        return TOTAL_BYTES - self.reserved

    @property
    def reserved(self) -> int:
        """Bytes."""
        return self.taken + self.kept

    def enqueue(self, stream: Stream, item: Work | Moment | Wait) -> None:
        """Starts it, or adds it to the graph that is captured from this stream."""
        with self.lock:
            if self.capturing is None or self.capturing.stream is not stream:
                stream.queue.append(item)
            elif isinstance(item, Work):
                self.capturing.work.append(item)
            elif isinstance(item, Moment):
                item.passed = True

    def host_waits_for(self, moment: Moment) -> None:
        """Runs what has to run until then."""
        with self.lock:
            self._refuse_in_capture("waiting")
            if self.order is Order.EARLY:
                self._run_what_may(behind=moment.stream)
            self._run_until(moment)
            if self.order is Order.EARLY:
                self._run_what_may()

    def run_all(self) -> None:
        """Until nothing is left."""
        for stream in self.streams:
            stream.finish()

    def synchronize(self, device: object = None) -> None:
        """torch.cuda.synchronize."""
        self.waits.append("busy: for the device")
        self.run_all()

    def _run_what_may(self, behind: Stream | None = None) -> None:
        """Everything that waits for nothing, but in one stream."""
        ready: list[Stream] | None = None
        while ready is None or ready:
            ready = [one for one in self.streams if one is not behind and one.queue and not _is_held(one.queue[0])]
            for stream in ready:
                self._advance(stream)

    def _run_until(self, moment: Moment) -> None:
        while not moment.passed:
            self._advance(moment.stream)

    def _advance(self, stream: Stream) -> None:
        item = stream.queue.popleft()
        if isinstance(item, Work):
            with torch.no_grad():
                item.run()
        elif isinstance(item, Moment):
            item.passed = True
        else:
            self._run_until(item.moment)

    def _stand_still(self, what: str) -> None:
        self._refuse_in_capture(what)
        self.waits.append(f"busy: {what}")
        _current_stream().finish()

    def _captures_here(self) -> bool:
        return self.capturing is not None and self.capturing.stream is _current_stream()

    def _refuse_in_capture(self, what: str) -> None:
        if self._captures_here():
            raise Violation(f"{what} while a graph is captured")

    # -- memory

    def _wrap(self, here: torch.Tensor) -> DeviceTensor:
        """Takes memory of the device for it."""
        allocation = _Allocation(next(self.keys), here.untyped_storage().nbytes(), {_current_stream()})
        self.taken += allocation.num_bytes
        self.kept -= min(self.kept, allocation.num_bytes)
        self.most_reserved = max(self.most_reserved, self.reserved)
        weakref.finalize(allocation, self._freed, allocation.key, allocation.num_bytes, allocation.streams)
        return DeviceTensor(here, allocation)

    def _freed(self, key: int, num_bytes: int, streams: set[Stream]) -> None:
        self.taken -= num_bytes
        self.kept += num_bytes
        for graph in self.graphs:
            graph.has_lost |= any(key in work.uses for work in graph.work)
        for stream in set(self.streams) - streams:
            if any(isinstance(item, Work) and key in item.uses for item in list(stream.queue)):
                self.violations.append("memory is freed that a stream has yet to use, for which it was not recorded")

    def _new(self, like: torch.Tensor) -> DeviceTensor:
        """A tensor of this shape that nothing has written."""
        here = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        _spoil(here)
        found = self._wrap(here)
        if self.capturing is not None and self._captures_here():
            self.capturing.made.append(found)
        return found

    # -- operations

    def _start(self, run: Callable[[], object], tensors: Sequence[DeviceTensor]) -> None:
        self.enqueue(_current_stream(), Work(run, frozenset(tensor.allocation.key for tensor in tensors)))

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Any operation of torch with a tensor of the device."""
        with self.lock:
            name = func._schema.name.removeprefix("aten::")
            if name == "copy_":
                return self.copy(*args, **kwargs)
            if name == "_to_copy":
                return self.converted(args[0], kwargs)
            tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            ours = [one for one in tensors if isinstance(one, DeviceTensor)]
            if any(one.dim() for one in tensors if not isinstance(one, DeviceTensor)):
                raise Violation(f"{func}: tensors of the host and of the device")
            here = pytree.tree_map_only(DeviceTensor, lambda one: one.here, (args, kwargs))
            return self._run(func, name, here, ours, args, kwargs)

    def _run(self, func: Any, name: str, here: Any, ours: list[DeviceTensor], args: Any, kwargs: dict[str, Any]) -> Any:
        if name in _HOST_WAITS or (name.startswith("index") and any(one.dtype == torch.bool for one in ours[1:])):
            self._stand_still(f"for {name}")
            return pytree.tree_map_only(torch.Tensor, self._wrap, func(*here[0], **here[1]))
        aliases = [one.alias_info for one in func._schema.returns]
        if aliases and all(alias is not None and not alias.is_write for alias in aliases):
            views = func(*here[0], **here[1])
            return pytree.tree_map_only(torch.Tensor, lambda one: DeviceTensor(one, ours[0].allocation), views)
        if not all(alias is None for alias in aliases):  # it writes what it was given
            self._start(lambda: func(*here[0], **here[1]), ours)
            return kwargs.get("out", args[0])
        meta_args, meta_kwargs = pytree.tree_map_only(DeviceTensor, _meta, (args, kwargs))
        found = pytree.tree_map_only(torch.Tensor, self._new, func(*meta_args, **meta_kwargs))
        outs = [one for one in pytree.tree_leaves(found) if isinstance(one, DeviceTensor)]
        into = [one.here for one in outs]
        if "empty" not in name:
            self._start(lambda: _copy_all(into, func(*here[0], **here[1])), [*ours, *outs])
        return found

    def make(self, factory: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """torch.zeros and the like, anywhere."""
        device = torch.device(kwargs.get("device") or "cpu")
        pin = kwargs.pop("pin_memory", False)
        if device.type == "cuda":
            values = factory(*args, **kwargs | {"device": "cpu"})
            if factory is _torch_tensor:
                return self.converted(values, {})
            found = self._new(values)
            into = found.here
            if factory is not _torch_empty:
                self._start(lambda: into.copy_(values), [found])
            return found
        made = factory(*args, **kwargs)
        if pin:
            self.pinned[made.data_ptr()] = made.untyped_storage()
        if pin and factory is _torch_empty:
            _spoil(made)
        return made

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Tensor.copy_: only between the device and pinned memory does the host not wait, if it says so."""
        into, what = (one.here if isinstance(one, DeviceTensor) else one for one in (target, source))
        ours = [one for one in (target, source) if isinstance(one, DeviceTensor)]
        waits = len(ours) == 1 and not (non_blocking and self._is_pinned(target, source))
        if waits and not isinstance(source, DeviceTensor):
            what = what.clone()
        self._start(lambda: into.copy_(what), ours)
        if waits:
            self._stand_still("for a copy between the device and the host")
        return target

    def put(self, target: DeviceTensor, index: Any, value: Any) -> None:
        """Writes to elements that tensors or lists name. The host waits where these are its own, or where a mask has to
        be counted.
        """
        if isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, DeviceTensor):
            raise Violation("an indexed assignment: tensors of the host and of the device")
        names = [one for one in _each(index) if not isinstance(one, int | slice | type(None) | type(...))]
        ours = [one for one in (target, value, *names) if isinstance(one, DeviceTensor)]
        counts = any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in names)
        waits = any(not isinstance(one, DeviceTensor) for one in names) or (counts and _dim(value) > 0)
        here, at, values = pytree.tree_map(_here, (target, index, value))
        self._start(lambda: here.__setitem__(at, values), ours)
        if waits:
            self._stand_still("for an indexed assignment")

    def _is_pinned(self, *tensors: torch.Tensor) -> bool:
        on_host = [one for one in tensors if not isinstance(one, DeviceTensor)]
        return all(one.untyped_storage().data_ptr() in self.pinned for one in on_host)

    def converted(self, source: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """A copy with another dtype or on another device. Of a tensor of the device the device is "meta"."""
        dtype = options.get("dtype") or source.dtype
        if isinstance(source, DeviceTensor) and torch.device(options.get("device") or "meta").type == "cpu":
            self._stand_still("for a copy between the device and the host")
            return source.here.to(dtype, copy=True)
        like = _meta(source) if isinstance(source, DeviceTensor) else source
        found = self._new(torch.empty_like(like, dtype=dtype, device="meta"))
        self.copy(found, source)
        return found

    def launch(self, kernel: Any, *args: Any, **kwargs: Any) -> None:
        """A kernel, which Triton's interpreter runs when its turn has come."""
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        ours = [one for one in tensors if isinstance(one, DeviceTensor)]
        if len(ours) < len(tensors):
            raise Violation(f"{kernel.fn.__name__}: a tensor of the host")
        here = pytree.tree_map_only(DeviceTensor, lambda one: one.here, (args, kwargs))
        self._start(lambda: self.run_kernel(kernel, *here[0], **here[1]), ours)


# ---- torch.cuda


_on: list[Card] = []


def _card() -> Card:
    return _on[-1]


def _current_stream(device: object = None) -> Stream:
    stream: Stream = getattr(_card().local, "stream", _card().streams[0])
    return stream


@contextmanager
def _use_stream(stream: Stream) -> Iterator[None]:
    before, _card().local.stream = _current_stream(), stream
    try:
        yield
    finally:
        _card().local.stream = before


@contextmanager
def _capture(
    graph: Graph, pool: object = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    card = _card()
    card.run_all()
    graph.pool, graph.stream = pool or graph, stream or Stream()
    with _use_stream(graph.stream):
        card.capturing = graph
        try:
            yield
        finally:
            card.capturing = None
    card.graphs.add(graph)
    card.captures += 1


def _is_held(item: Work | Moment | Wait) -> bool:
    return isinstance(item, Wait) and not item.moment.passed


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _each(index: Any) -> tuple[Any, ...]:
    """The parts of an index."""
    return index if isinstance(index, tuple) else (index,)


def _dim(value: Any) -> int:
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _here(value: Any) -> Any:
    """A value as it is now on the host, or where the data of a tensor of the device lies."""
    if isinstance(value, DeviceTensor):
        return value.here
    return value.clone() if isinstance(value, torch.Tensor) else value


def _spoil(*tensors: torch.Tensor) -> None:
    """Makes of them memory that nothing has written: NaN, or numbers that are no index."""
    for here in tensors:
        whole = _torch_empty(0, dtype=torch.uint8).set_(here.untyped_storage())
        whole.fill_(0xFF if here.is_floating_point() else 0x7F)


def _copy_all(targets: list[torch.Tensor], found: object) -> None:
    results = [one for one in pytree.tree_leaves(found) if isinstance(one, torch.Tensor)]
    for target, result in zip(targets, results, strict=True):
        target.copy_(result)


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    device, dtype, *_ = torch._C._nn._parse_to(*args, **{key: kwargs[key] for key in kwargs if key != "copy"})
    if device is None or device.type != "cuda":
        return _torch_to(tensor, *args, **kwargs)
    return _card().converted(tensor, {"dtype": dtype})


def _launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
    _card().launch(kernel, *args, **kwargs)


@contextmanager
def emulated_cuda(order: Order) -> Iterator[Card]:
    """torch.cuda is an emulated device inside, in all threads. Raises what it found at the end."""
    card = Card(order, interpreter.GridExecutor.__call__)
    _on.append(card)
    Stream()
    properties = SimpleNamespace(multi_processor_count=4)
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "get_device_properties": lambda device: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (card.free, TOTAL_BYTES),
        "memory_reserved": lambda device=None: card.reserved,
        "max_memory_reserved": lambda device=None: card.most_reserved,
        "reset_peak_memory_stats": lambda device=None: setattr(card, "most_reserved", card.reserved),
        "empty_cache": lambda: setattr(card, "kept", 0),
        "synchronize": card.synchronize,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "current_stream": _current_stream,
        "stream": _use_stream,
        "graph": _capture,
        "graph_pool_handle": object,
    }
    torch_itself = {
        "Generator": lambda device=None: _torch_generator(),
        "inference_mode": torch.no_grad,  # in the former, views of what was made outside are refused to subclasses
    }
    for name in _FACTORIES:
        made_by = getattr(torch, name)
        torch_itself[name] = lambda *args, _made_by=made_by, **kwargs: card.make(_made_by, *args, **kwargs)
    with ExitStack() as stack:
        stack.callback(_on.pop)
        for owner, fakes in ((torch.cuda, cuda), (torch, torch_itself)):
            for name, fake in fakes.items():
                stack.enter_context(mock.patch.object(owner, name, fake))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(mock.patch.object(torch.Tensor, "to", _to))
        stack.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", _launch))
        yield card
        card.run_all()
        if card.violations:
            raise Violation("; ".join(card.violations))
