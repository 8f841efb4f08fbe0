"""The frame of every kernel: each thread of a team calls it once, and takes items until none is left."""

from collections import namedtuple
from collections.abc import Callable
from functools import wraps
from typing import Any

from numba import int64, types

from services.engine.kernels.cpu.compiled import MachineCode, compiled
from services.engine.kernels.cpu.intrinsics import address_of, fetch_add, long_pointer

ITEM_COUNTER, NUM_ITEMS, AT_A_TIME, THREAD_COUNTER, MAX_THREADS = range(5)  # index in a kernel's int64 arguments
NUM_HEADER = 5  # the kernel's own arguments follow


def places(names: str) -> Any:
    """Returns a tuple with these names: the index of each of a kernel's own arguments, in the order in which they are
    passed.
    """
    fields = names.split()
    return namedtuple("Places", fields)(*range(NUM_HEADER, NUM_HEADER + len(fields)))


def per_item(make: Callable[..., Any]) -> Callable[..., MachineCode]:
    """Decorates a maker of `work(arguments, item, thread)`, which then returns a C function of a pointer to int64.
    `compiled` says what the maker may depend on.

    thread: below MAX_THREADS, so that each thread may have memory of its own; further threads do nothing.
    """

    @compiled(types.CPointer(int64))
    @wraps(make)
    def make_kernel(*args: Any, **kwargs: Any) -> Any:
        work = make(*args, **kwargs)

        def kernel(a: Any) -> None:
            thread = fetch_add(long_pointer(address_of(a) + THREAD_COUNTER * 8), 1)
            while thread < a[MAX_THREADS]:
                start = fetch_add(long_pointer(address_of(a) + ITEM_COUNTER * 8), a[AT_A_TIME])
                if start >= a[NUM_ITEMS]:
                    break
                for item in range(start, min(start + a[AT_A_TIME], a[NUM_ITEMS])):
                    work(a, item, thread)

        return kernel

    return make_kernel
