"""Attention over a pool of slices: one backend for each slice of layers, all over the same pool.

To its backend a slice is a model of few layers with a block table of its own. So no backend knows of slices, and each
layer of the model reads and writes where its own slice lies. `kvtransfer/layer_groups.py` says which layers those are.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from kvtransfer.layer_groups import LayerGroups
from services.engine.attention.base import Attention, KernelInputs, PagedQueries
from services.engine.attention.by_layer import Windows


@dataclass(frozen=True, slots=True, eq=False)
class SlicedPlan:
    """The plans of the slices' backends; None: the step does nothing in the layers of this slice."""

    of_slices: tuple[Any, ...]


class SlicedAttention:
    """`Attention` of a model whose layers are in slices."""

    def __init__(self, groups: LayerGroups, make: Callable[[tuple[int, ...]], Attention[Any]]) -> None:
        """make: makes the backend of a slice with these layers of the model, which have the places 0 to n - 1 in it."""
        slices = [layers for group in groups.slices for layers in group]
        self._backends = [make(layers) for layers in slices]
        self._places = {layer: (number, at) for number, layers in enumerate(slices) for at, layer in enumerate(layers)}
        self._first_layers = [layers[0] for layers in slices]

    @property
    def writes_by_kernel(self) -> bool:
        """See `Attention.writes_by_kernel`."""
        return self._backends[0].writes_by_kernel

    def prepare(self, queries: PagedQueries, windows: Windows = None) -> SlicedPlan:
        """See `Attention.prepare`. The table of each slice follows that of the one before: int32[R, S * B]."""
        assert isinstance(windows, tuple), "layers in slices differ in their windows"
        tables = np.split(queries.block_tables, len(self._backends), axis=1)
        return SlicedPlan(
            tuple(
                backend.prepare(replace(queries, block_tables=np.ascontiguousarray(own)), windows[layer])
                for backend, own, layer in zip(self._backends, tables, self._first_layers, strict=True)
            )
        )

    def narrow(self, plan: SlicedPlan, tokens: Tensor, layer: int) -> SlicedPlan | None:
        """See `Attention.narrow`."""
        number, at = self._places[layer]
        narrowed = self._backends[number].narrow(plan.of_slices[number], tokens, at)
        if narrowed is None:
            return None
        return SlicedPlan(tuple(narrowed if each == number else None for each in range(len(self._backends))))

    def kernel_inputs(self, plan: SlicedPlan) -> KernelInputs | None:
        """See `Attention.kernel_inputs`."""
        numbers: list[int] = []
        tensors: list[Tensor] = []
        for backend, own in zip(self._backends, plan.of_slices, strict=True):
            if (inputs := backend.kernel_inputs(own)) is None:
                return None
            numbers += len(inputs[0]), *inputs[0]
            tensors += inputs[1]
        return tuple(numbers), tuple(tensors)

    @property
    def rotate_and_write(self) -> None:
        """See `Attention.rotate_and_write`."""

    def write(self, plan: SlicedPlan, layer: int, k: Tensor, v: Tensor) -> None:
        """See `Attention.write`."""
        number, at = self._places[layer]
        self._backends[number].write(plan.of_slices[number], at, k, v)

    def attend(self, plan: SlicedPlan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        number, at = self._places[layer]
        found: tuple[Tensor, Tensor] = self._backends[number].attend(plan.of_slices[number], at, q, k, v)
        return found
