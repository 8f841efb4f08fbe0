"""x as products of codes take it: in their order, widened, filled up with zeros; and its sums over groups."""

from typing import Any

from numba import float32

from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.intrinsics import float_pointer, int_pointer, njit
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.vectors import LANES, spread, sum_of_lanes


def make_prepare_row(dtype: str, *, widens: bool) -> Any:
    """Makes a function that kernels call for a row of x of this dtype.

    Its arguments: address of the row; its order, int32, or 0; depth; depth of whole steps; address of the copy, or 0
    for none; depth of a group; address of the sums over groups, or 0 for none. A copy is float32 if it `widens`.
    """
    source_element, element = ELEMENTS[dtype], ELEMENTS["float32" if widens else dtype]
    read, write, pointer, target_pointer = (
        source_element.load,
        element.store,
        source_element.pointer,
        element.pointer,
    )
    read_vector, write_vector, source_size, size = (
        source_element.load_vector,
        element.store_vector,
        source_element.size,
        element.size,
    )
    read_copy, read_copied_vector = element.load, element.load_vector

    @njit
    def copy(x: int, order: int, depth: int, padded_depth: int, target: int) -> None:
        copied = 0
        if order == 0:
            copied = depth // LANES * LANES
            for i in range(0, copied, LANES):
                write_vector(target + i * size, read_vector(x + i * source_size))
        for i in range(copied, depth):
            place = int_pointer(order)[i] if order != 0 else i
            write(target_pointer(target), i, read(pointer(x), place))
        for i in range(depth, padded_depth):
            write(target_pointer(target), i, float32(0))

    @njit
    def add_up(x: int, depth: int, group: int, sums: int) -> None:
        for number in range((depth + group - 1) // group):
            begin, end = number * group, min((number + 1) * group, depth)
            whole = begin + (end - begin) // LANES * LANES
            lanes = spread(float32(0))
            for i in range(begin, whole, LANES):
                lanes = lanes + read_copied_vector(x + i * size)
            total = sum_of_lanes(lanes)
            for i in range(whole, end):
                total += read_copy(target_pointer(x), i)
            float_pointer(sums)[number] = total

    @njit
    def prepare(x: int, order: int, depth: int, padded_depth: int, target: int, group: int, sums: int) -> None:
        source = x
        if target != 0:
            copy(x, order, depth, padded_depth, target)
            source = target
        if sums != 0:
            add_up(source, depth, group, sums)

    return prepare


@per_item
def make_prepare(dtype: str, *, widens: bool) -> Any:
    """Makes the kernel that prepares x, a row of it in each item.

    Arguments of the kernel: x and the elements from row to row; order, int32, or 0; depth; depth of whole steps; copies
    or 0, and bytes from row to row; depth of a group; sums or 0, and bytes from row to row.
    """
    arg = places("x stride order depth padded_depth target target_row group sums sums_row")
    size, prepare = ELEMENTS[dtype].size, make_prepare_row(dtype, widens=widens)

    def work(a: Any, item: int, _thread: int) -> None:
        target = a[arg.target] + item * a[arg.target_row] if a[arg.target] != 0 else 0
        sums = a[arg.sums] + item * a[arg.sums_row] if a[arg.sums] != 0 else 0
        x = a[arg.x] + item * a[arg.stride] * size
        prepare(x, a[arg.order], a[arg.depth], a[arg.padded_depth], target, a[arg.group], sums)

    return njit(work)
