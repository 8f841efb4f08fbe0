"""What every kernel is: a function called by each thread of a team, which takes items until there are none."""

from collections import namedtuple
from collections.abc import Callable
from functools import wraps
from typing import Any

from numba import int64, types

from services.engine.kernels.cpu.compiled import MachineCode, compiled
from services.engine.kernels.cpu.intrinsics import address_of, fetch_add, long_pointer

ITEM_COUNTER, NUM_ITEMS, AT_A_TIME, THREAD_COUNTER, MAX_THREADS = range(5)  # of a kernel's int64 arguments
NUM_HEADER = 5  # its own follow


def places(names: str) -> Any:
    """Where in a kernel's arguments its own lie: a tuple with these names, in the order in which they are passed."""
    fields = names.split()
    return namedtuple("Places", fields)(*range(NUM_HEADER, NUM_HEADER + len(fields)))


def per_item(make: Callable[..., Any]) -> Callable[..., MachineCode]:
    """Decorates a maker of `work(arguments, item, thread)`: it returns a C function of a pointer to int64. See
    `compiled` for what the maker may depend on.

    thread: below MAX_THREADS, so that each may have memory of its own; if there are more, they do nothing.
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
