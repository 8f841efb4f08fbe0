"""Attention over a pool of slices: one backend for each slice of layers, all over the same pool.

To its backend a slice is a model of few layers with a block table of its own, so each layer of the model reads and
writes where its own slice lies. One backend plans a step for all of them, since their index work differs in the tables
alone. `kvtransfer/layer_groups.py` says which layers a slice has.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvtransfer.layer_groups import LayerGroups
from services.engine.attention.base import KernelInputs, PagedQueries
from services.engine.attention.by_layer import Windows
from services.engine.attention.cpu_attention import CpuAttention, CpuPlan


@dataclass(frozen=True, slots=True, eq=False)
class SlicedPlan:
    """The plans of the slices' backends; None: the step does nothing in the layers of this slice."""

    of_slices: tuple[CpuPlan | None, ...]


class SlicedAttention:
    """`Attention` of a model whose layers are in slices."""

    def __init__(self, groups: LayerGroups, make: Callable[[tuple[int, ...]], CpuAttention]) -> None:
        """make: makes the backend of a slice with these layers of the model, which have the places 0 to n - 1 in it."""
        self._backends = [make(layers) for layers in groups.in_order]
        self._places = groups.places
        self._first_layers = [layers[0] for layers in groups.in_order]

    @property
    def writes_by_kernel(self) -> bool:
        """See `Attention.writes_by_kernel`."""
        return self._backends[0].writes_by_kernel

    def prepare(self, queries: PagedQueries, windows: Windows = None) -> SlicedPlan:
        """See `Attention.prepare`. The table of each slice follows that of the one before: int32[R, S * B]."""
        assert isinstance(windows, tuple), "layers in slices differ in their windows"
        of_slices = [windows[layer] for layer in self._first_layers]
        return SlicedPlan(tuple(self._backends[0].prepare_slices(queries, of_slices)))

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


def _of_slice(plan: SlicedPlan, number: int) -> CpuPlan:
    found = plan.of_slices[number]
    assert found is not None, "the step does nothing in this layer"
    return found
