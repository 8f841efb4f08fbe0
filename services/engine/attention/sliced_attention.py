"""Attention over a pool of slices: one backend for each slice of layers, all over the same pool.

To its backend a slice is a model of few layers with a block table of its own, so each layer of the model reads and
writes where its own slice lies. One backend plans a step for all of them, since their index work differs in the tables
alone. `kvtransfer/layer_groups.py` says which layers a slice has.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from kvtransfer.layer_groups import LayerGroups
from services.engine.attention.base import KernelInputs, PagedQueries
from services.engine.attention.by_layer import Windows
from services.engine.attention.cpu_attention import CpuAttention, CpuPlan


@dataclass(frozen=True, slots=True, eq=False)
class SlicedPlan:
    """The plans of the backends; None: the step does nothing in the layers of this slice."""

    of_slices: tuple[CpuPlan | None, ...]


class SlicedAttention:
    """`Attention` of a model whose layers are in slices."""

    def __init__(self, groups: LayerGroups, own_layers: range, make: Callable[[tuple[int, ...]], CpuAttention]) -> None:
        """own_layers: of the model, those of this stage, which all methods count from 0. make: makes the backend of a
        slice with these layers of the model, which have the places 0 to n - 1 in it.
        """
        own = [number for number, layers in enumerate(groups.in_order) if not set(layers).isdisjoint(own_layers)]
        self._num_slices, self._own = groups.num_slices, own
        self._backends = [make(groups.in_order[number]) for number in own]
        places = [groups.places[layer] for layer in own_layers]
        self._places = [(own.index(number), at) for number, at in places]  # of each layer: its backend, and place there
        of_backends = [[layer for layer, at in enumerate(self._places) if at[0] == each] for each in range(len(own))]
        self._first_layers = [layers[0] for layers in of_backends]
        # Of a slice, the layers that are here: others are written by other stages, at any time.
        self._own_layers = None
        if len(own_layers) < len(groups.places):
            ends = ((self._places[layers[0]][1], self._places[layers[-1]][1]) for layers in of_backends)
            self._own_layers = [range(first, last + 1) for first, last in ends]

    @property
    def writes_by_kernel(self) -> bool:
        """See `Attention.writes_by_kernel`."""
        return self._backends[0].writes_by_kernel

    def prepare(self, queries: PagedQueries, windows: Windows = None) -> SlicedPlan:
        """See `Attention.prepare`. The table of each slice follows that of the one before: int32[R, S * B]."""
        assert isinstance(windows, tuple), "layers in slices differ in their windows"
        of_slices = [windows[layer] for layer in self._first_layers]
        if len(self._own) < self._num_slices:
            queries = replace(queries, block_tables=self._own_tables(queries.block_tables))
        return SlicedPlan(tuple(self._backends[0].prepare_slices(queries, of_slices, self._own_layers)))

    def narrow(self, plan: SlicedPlan, tokens: Tensor, layer: int) -> SlicedPlan | None:
        """See `Attention.narrow`."""
        number, at = self._places[layer]
        narrowed = self._backends[number].narrow(_of_slice(plan, number), tokens, at)
        if narrowed is None:
            return None
        return SlicedPlan(tuple(narrowed if each == number else None for each in range(len(self._backends))))

    def kernel_inputs(self, plan: SlicedPlan) -> KernelInputs | None:
        """See `Attention.kernel_inputs`."""
        numbers: list[int] = []
        tensors: dict[int, Tensor] = {}  # each once, also where plans have it in common
        for number, backend in enumerate(self._backends):
            if (inputs := backend.kernel_inputs(_of_slice(plan, number))) is None:
                return None
            numbers += len(inputs[0]), *inputs[0]
            for tensor in inputs[1]:
                tensors[id(tensor)] = tensor
        return tuple(numbers), tuple(tensors.values())

    @property
    def rotate_and_write(self) -> None:
        """See `Attention.rotate_and_write`."""

    def write(self, plan: SlicedPlan, layer: int, k: Tensor, v: Tensor) -> None:
        """See `Attention.write`."""
        number, at = self._places[layer]
        self._backends[number].write(_of_slice(plan, number), at, k, v)

    def attend(self, plan: SlicedPlan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        number, at = self._places[layer]
        return self._backends[number].attend(_of_slice(plan, number), at, q, k, v)

    def _own_tables(self, tables: np.ndarray) -> np.ndarray:
        """Returns the tables of this stage's slices, of rows that have those of all slices."""
        rows, width = tables.shape
        return tables.reshape(rows, self._num_slices, width // self._num_slices)[:, self._own].reshape(rows, -1)


def _of_slice(plan: SlicedPlan, number: int) -> CpuPlan:
    found = plan.of_slices[number]
    assert found is not None, "the step does nothing in this layer"
    return found
