"""Memory accesses of kernels in Triton's interpreter: the faults that compute-sanitizer finds on a GPU, and some more.

The interpreter runs programs one after the other, so results alone do not show what goes wrong when they run at once.
Here every access of a launch is noted, and these are found:

    outside      beside every tensor that the launch was given; it is not carried out
    two writes   of different values to one place, by two programs or by two lanes of one store
    a race       one program reads what another writes
    no barrier   a program reads back what other threads of it may have stored

Not found: a program that reads and then writes a place without a barrier, an access beyond one tensor's end that lands
in another tensor, and compare-and-swap.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, interpreter_builder

_Accesses = tuple[np.ndarray, np.ndarray, np.ndarray]  # of single bytes: uint64 addresses, programs, uint8 values


class _Launch:
    """The accesses of one launch so far."""

    def __init__(self, name: str, tensors: list[torch.Tensor], found: list[str]) -> None:
        self._name = name
        self._found = found
        self._spans = {
            "read": _sorted_spans([_all_memory(one) if _is_index(one) else _span(one) for one in tensors]),
            "write": _sorted_spans([_span(one) for one in tensors]),
        }
        self._program = -1
        self._stored: list[np.ndarray] = []  # by this program, since its last barrier
        self._accesses: dict[str, list[_Accesses]] = {"read": [], "write": [], "atomic": []}

    def begin_program(self) -> None:
        self._program += 1
        self._stored = []

    def barrier(self) -> None:
        self._stored = []

    def access(self, kind: str, pointers: Any, mask: Any, values: Any = None) -> Any:
        """Notes the accesses of the mask's lanes, and returns the mask without lanes that are outside of tensors.

        Pointers, mask and values are TensorHandles.
        """
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        lanes = mask.data.astype(bool) & np.ones(pointers.data.shape, bool)
        starts = np.broadcast_to(pointers.data, lanes.shape).astype(np.uint64)
        inside = self._inside(starts, size, "read" if kind == "read" else "write")
        if (lanes & ~inside).any():
            self._note(f"{kind} outside of its tensors")
            lanes &= inside
            mask = type(mask)(lanes, mask.dtype)
        starts = starts[lanes]
        given = np.zeros((starts.size, size), np.uint8)
        if values is not None:
            given = np.ascontiguousarray(np.broadcast_to(values.data, lanes.shape)[lanes])
            given = given.view(np.uint8).reshape(-1, size)
        places = (starts[:, None] + np.arange(size, dtype=np.uint64)).reshape(-1)
        accesses = places, np.full(places.size, self._program), given.reshape(-1)
        if kind == "write" and _conflict(_sorted(accesses), across=False):
            self._note("one store writes different values to one place")
        if kind == "read" and any(np.isin(places, stored).any() for stored in self._stored):
            self._note("a program reads what it has stored, without a barrier")
        if kind != "read":
            self._stored.append(places)
        self._accesses[kind].append(accesses)
        return mask

    def end(self) -> None:
        """Looks for conflicts between programs at the end of the launch."""
        reads, writes, atomics = (_sorted(*self._accesses[kind]) for kind in ("read", "write", "atomic"))
        if _conflict(writes, across=True):
            self._note("two programs write different values to one place")
        if _meet(reads, writes):
            self._note("a program reads what another writes")
        if _meet(atomics, writes) or _meet(atomics, reads):
            self._note("a program changes in one step what another reads or writes")

    def _inside(self, starts: np.ndarray, size: int, kind: str) -> np.ndarray:
        """Tells which addresses lie inside a tensor."""
        begins, ends = self._spans[kind]
        at = np.searchsorted(begins, starts, side="right")  # how many begin no later
        return starts + np.uint64(size) <= np.append(np.uint64(0), ends)[at]

    def _note(self, what: str) -> None:
        text = f"{self._name}: {what}"
        if text not in self._found:
            self._found.append(text)


@contextmanager
def watched_memory() -> Iterator[list[str]]:
    """Yields the faults of launches within the block, in words, each once. Only where kernels are interpreted."""
    found: list[str] = []
    launches: list[_Launch] = []
    run, builder = GridExecutor.__call__, interpreter_builder
    read, write, change = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    barrier, begin = builder.create_barrier, builder.set_grid_idx

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        launches.append(_Launch(kernel.fn.__name__, tensors, found))
        try:
            run(kernel, *args, **kwargs)
        finally:
            launches.pop().end()

    def load(pointers: Any, mask: Any, *rest: Any) -> Any:
        mask = launches[-1].access("read", pointers, mask)
        return read(pointers, mask, *rest)

    def store(pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
        mask = launches[-1].access("write", pointers, mask, values)
        return write(pointers, values, mask, *rest)

    def rmw(operation: Any, pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
        mask = launches[-1].access("atomic", pointers, mask)
        return change(operation, pointers, values, mask, *rest)

    def at_barrier() -> Any:
        launches[-1].barrier()
        return barrier()

    def at_program(*index: int) -> None:
        launches[-1].begin_program()
        begin(*index)

    hooks = {
        "create_masked_load": load,
        "create_masked_store": store,
        "create_atomic_rmw": rmw,
        "create_barrier": at_barrier,
        "set_grid_idx": at_program,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(GridExecutor, "__call__", launch))
        for name, hook in hooks.items():
            stack.enter_context(mock.patch.object(builder, name, hook))
        yield found


def _is_index(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64)


def _all_memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses of a tensor's storage, from and to. A recorded launch reads what later steps put there."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses of a tensor, from and to."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() * (tensor.numel() > 0)


def _sorted_spans(spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Sorts spans by their beginning, and gives each the last end of those that begin no later."""
    begins, ends = np.array(sorted(spans), dtype=np.uint64).reshape(-1, 2).T
    return begins, np.maximum.accumulate(ends)


def _sorted(*accesses: _Accesses) -> _Accesses:
    """Sorts all accesses by address."""
    if not accesses:
        return np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.uint8)
    places, programs, values = (np.concatenate(parts) for parts in zip(*accesses, strict=True))
    order = np.argsort(places, kind="stable")
    return places[order], programs[order], values[order]


def _conflict(accesses: _Accesses, *, across: bool) -> bool:
    """Tells whether one place gets two values; across: from two programs. Places rise."""
    places, programs, values = accesses
    if not len(places):
        return False
    firsts = np.flatnonzero(np.append(True, places[1:] != places[:-1]))
    conflicts = _differ(values, firsts) & _differ(programs, firsts) if across else _differ(values, firsts)
    return bool(conflicts.any())


def _differ(array: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    """Tells for each stretch of equal places, by its beginning, whether its values differ."""
    return np.asarray(np.minimum.reduceat(array, firsts) != np.maximum.reduceat(array, firsts))


def _meet(some: _Accesses, others: _Accesses) -> bool:
    """Tells whether two programs have one place, one in `some` and one in `others`. Programs rise at each place."""
    places, programs, _ = others
    if not len(places):
        return False
    first = np.minimum(np.searchsorted(places, some[0], side="left"), len(places) - 1)
    last = np.searchsorted(places, some[0], side="right") - 1
    there = places[first] == some[0]
    return bool((there & ((programs[first] != some[1]) | (programs[last] != some[1]))).any())
