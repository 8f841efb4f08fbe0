"""Windows of a model's layers, and what a step's plan has once for all layers with the same window."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

T = TypeVar("T")

Windows = int | None | tuple[int | None, ...]  # of all layers, or of each layer; None: a layer has no window


@dataclass(frozen=True, slots=True, eq=False)
class ByLayer(Generic[T]):
    """One value for each distinct window, found by layer."""

    values: tuple[T, ...]
    index: tuple[int, ...]  # of each layer's value; empty: all layers have the first one

    def at(self, layer: int) -> T:
        """Returns the value of a layer."""
        return self.values[self.index[layer] if self.index else 0]

    def __iter__(self) -> Iterator[T]:
        return iter(self.values)


def by_layer(windows: Windows, make: Callable[[int | None], T]) -> ByLayer[T]:
    """Makes a value for each distinct window."""
    distinct, index = distinct_windows(windows)
    return ByLayer(tuple(map(make, distinct)), index)


@cache
def distinct_windows(windows: Windows) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """Returns the distinct windows, and the index of each layer's; no indices if all layers have the same one."""
    if not isinstance(windows, tuple):
        return (windows,), ()
    distinct = tuple(dict.fromkeys(windows))
    return distinct, tuple(map(distinct.index, windows)) if len(distinct) > 1 else ()
