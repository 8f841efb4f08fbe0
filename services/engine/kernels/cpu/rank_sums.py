"""Kernels by which the ranks of a model, processes of one host, join their results through memory that all of them map.

Each rank has a slot for each row, into which it alone writes. A slot begins with lines of 64 bytes that say which
result lies in it:

    sum      two slots for a row, used in turn:   | flag | numbers ... |
    gather   one slot for a row:                  | flag | taken | numbers ... |

A flag is the number of the step, shifted, and how many results the row has had since the memory was made, together
(`base` and `counts`): it grows from result to result. Whoever waits for a flag and finds a larger one has missed a
result: then the ranks do not compute the same step, and the kernel says so in place of the abort word.
"""

from enum import IntEnum
from typing import Any

from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.intrinsics import (
    call_at,
    cycles,
    load_acquire,
    long_pointer,
    njit,
    pause,
    store_release,
)
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.vectors import LANES

LINE_BYTES = 64
WAIT_LINES = 64
_TRIES = 500  # before a thread that waits offers its core
_GOES_ON, _OUT_OF_STEP = 0, 2


class AbortWord(IntEnum):
    """The state of the ranks, in memory that all of them map."""

    GOES_ON = _GOES_ON
    ABORTED = 1
    OUT_OF_STEP = _OUT_OF_STEP


@njit
def _wait_for(flag: int, value: int, abort: int, sched_yield: int, waited: int) -> bool:
    """Waits until the word at an address has the value. Returns False if that does not happen any more.

    waited: address of the cycles for which this thread has waited so far.
    """
    if load_acquire(long_pointer(flag)) == value:
        return True
    began, tries = cycles(), 0
    while True:
        found = load_acquire(long_pointer(flag))
        if found == value:
            break
        if found > value:
            store_release(long_pointer(abort), _OUT_OF_STEP)
        if load_acquire(long_pointer(abort)) != _GOES_ON:
            break
        tries += 1
        if tries % _TRIES == 0:
            call_at(sched_yield, 0)
        pause()
    long_pointer(waited)[0] += cycles() - began
    return bool(found == value)


@njit
def _of_thread(waits: int, thread: int) -> int:
    """Returns the address of a thread's line of the cycles waited; with very many threads some have one together."""
    return waits + (thread % WAIT_LINES) * LINE_BYTES


def _copier(dtype: str) -> Any:
    """Makes a function that copies elements from one address to another."""
    pointer = ELEMENTS[dtype].pointer

    @njit
    def copy(source: int, target: int, count: int) -> None:
        come, go = pointer(source), pointer(target)
        for i in range(count):
            go[i] = come[i]

    return copy


@per_item
def make_publish(dtype: str) -> Any:
    """Makes a kernel that puts rows into this rank's slots of sums. An item is a row. It never waits.

    Arguments of the kernel: x [rows, width], and the elements from row to row in it; width; this rank's slots; the
    number of rows that have slots; bytes of a slot; int64 counts of the rows; address of the base.
    """
    copy, size = _copier(dtype), ELEMENTS[dtype].size
    arg = places("x stride width slots max_rows slot_bytes counts base")

    @njit
    def work(a: Any, row: int, _thread: int) -> None:
        counts = long_pointer(a[arg.counts])
        count = counts[row] + 1
        counts[row] = count
        slot = a[arg.slots] + ((count & 1) * a[arg.max_rows] + row) * a[arg.slot_bytes]
        copy(a[arg.x] + row * a[arg.stride] * size, slot + LINE_BYTES, a[arg.width])
        store_release(long_pointer(slot), long_pointer(a[arg.base])[0] + count)

    return work


@per_item
def make_collect(dtype: str) -> Any:
    """Makes a kernel that adds up the rows of all ranks, in the order of the ranks, in float32, and rounds the sums
    once. It comes after `make_publish` of the same rows. An item is a row, for which it waits.

    Arguments of the kernel: out [rows, width], and the elements from row to row in it; width; slots of rank 0; the
    number of rows that have slots; bytes of a slot; int64 counts of the rows; address of the base; bytes from one
    rank's slots to the next one's; number of ranks; address of the abort word; that of sched_yield; that of
    the cycles waited, a line for each of WAIT_LINES threads.
    """
    element = ELEMENTS[dtype]
    load_vector, store_vector, size = element.load_vector, element.store_vector, element.size
    load, store, pointer = element.load, element.store, element.pointer
    arg = places("out stride width slots max_rows slot_bytes counts base rank_bytes num_ranks abort sched_yield waits")

    @njit
    def add(first: int, apart: int, num_ranks: int, out: int, width: int) -> None:
        whole = width // LANES * LANES
        for i in range(0, whole, LANES):
            total = load_vector(first + i * size)
            for rank in range(1, num_ranks):
                total = total + load_vector(first + rank * apart + i * size)
            store_vector(out + i * size, total)
        for i in range(whole, width):
            single = load(pointer(first), i)
            for rank in range(1, num_ranks):
                single = single + load(pointer(first + rank * apart), i)
            store(pointer(out), i, single)

    @njit
    def work(a: Any, row: int, thread: int) -> None:
        waited = _of_thread(a[arg.waits], thread)
        count, apart, num_ranks = long_pointer(a[arg.counts])[row], a[arg.rank_bytes], a[arg.num_ranks]
        slot = a[arg.slots] + ((count & 1) * a[arg.max_rows] + row) * a[arg.slot_bytes]
        flag = long_pointer(a[arg.base])[0] + count
        for rank in range(num_ranks):
            if not _wait_for(slot + rank * apart, flag, a[arg.abort], a[arg.sched_yield], waited):
                return
        add(slot + LINE_BYTES, apart, num_ranks, a[arg.out] + row * a[arg.stride] * size, a[arg.width])

    return work


@per_item
def make_send(dtype: str) -> Any:
    """Makes a kernel that puts a rank's columns of rows into its slots, for rank 0. An item is a row: it waits until
    rank 0 has taken the row before it.

    Arguments of the kernel: part [rows, width], and the elements from row to row in it; width; this rank's slots; bytes
    of a slot; int64 counts of the rows; address of the base; that of the abort word; that of sched_yield; that of
    the cycles waited, as of `make_collect`.
    """
    copy, size = _copier(dtype), ELEMENTS[dtype].size
    arg = places("part stride width slots slot_bytes counts base abort sched_yield waits")

    @njit
    def work(a: Any, row: int, thread: int) -> None:
        waited = _of_thread(a[arg.waits], thread)
        counts, slot = long_pointer(a[arg.counts]), a[arg.slots] + row * a[arg.slot_bytes]
        count = counts[row] + 1
        counts[row] = count
        before = long_pointer(slot)[0]
        if not _wait_for(slot + LINE_BYTES, before, a[arg.abort], a[arg.sched_yield], waited):
            return
        copy(a[arg.part] + row * a[arg.stride] * size, slot + 2 * LINE_BYTES, a[arg.width])
        store_release(long_pointer(slot), long_pointer(a[arg.base])[0] + count)

    return work


@per_item
def make_receive(dtype: str) -> Any:
    """Makes a kernel by which rank 0 puts the columns of all ranks beside each other. An item is a row, for which it
    waits.

    Arguments of the kernel: rank 0's own part, and the elements from row to row in it; out [rows, width], and the
    elements from row to row in it; width; slots of rank 0; bytes of a slot; int64 counts of the rows; address of the
    base; bytes from one rank's slots to the next one's; number of ranks; address of the abort word; that of
    sched_yield; that of the cycles waited, as of `make_collect`.
    """
    copy, size = _copier(dtype), ELEMENTS[dtype].size
    rows, slots = "part stride out out_stride width", "slots slot_bytes counts base rank_bytes num_ranks"
    arg = places(f"{rows} {slots} abort sched_yield waits")

    @njit
    def work(a: Any, row: int, thread: int) -> None:
        waited = _of_thread(a[arg.waits], thread)
        counts, num_ranks, width = long_pointer(a[arg.counts]), a[arg.num_ranks], a[arg.width]
        count = counts[row] + 1
        counts[row] = count
        flag, out = long_pointer(a[arg.base])[0] + count, a[arg.out] + row * a[arg.out_stride] * size
        copy(a[arg.part] + row * a[arg.stride] * size, out, width // num_ranks)
        for rank in range(1, num_ranks):
            begin, end = rank * width // num_ranks, (rank + 1) * width // num_ranks
            slot = a[arg.slots] + rank * a[arg.rank_bytes] + row * a[arg.slot_bytes]
            if not _wait_for(slot, flag, a[arg.abort], a[arg.sched_yield], waited):
                return
            copy(slot + 2 * LINE_BYTES, out + begin * size, end - begin)
            store_release(long_pointer(slot + LINE_BYTES), flag)

    return work


@per_item
def make_read_cycles() -> Any:
    """Makes a kernel that writes the processor's time stamp, of which waits are made, to an address, its argument."""
    arg = places("out")

    @njit
    def work(a: Any, _item: int, _thread: int) -> None:
        long_pointer(a[arg.out])[0] = cycles()

    return work
