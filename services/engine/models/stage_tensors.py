"""The tensors of a stage, a part of a model's layers, under the names that they have in a model of these layers alone:
what reads a stage does not know that there are others.
"""

import torch
from torch import Tensor

from services.engine.models.shapes import OF_LAYER, Shares
from services.engine.models.tensor_source import TensorSource, WrappedTensors
from services.engine.quantization.codes import CodedMatrix


class StageTensors(WrappedTensors):
    """A `TensorSource` of some layers of another one, which are counted from 0, and of what is outside of layers."""

    def __init__(self, source: TensorSource, layers: range) -> None:
        super().__init__(source)
        self._layers = layers

    @property
    def names(self) -> frozenset[str]:
        """See `TensorSource.names`."""
        names = (_own_name(name, self._layers) for name in self._source.names)
        return frozenset(name for name in names if name is not None)

    def home(self, name: str) -> str:
        """See `TensorSource.home`."""
        return self._source.home(self._stored(name))

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorSource.dtype`."""
        return self._source.dtype(self._stored(name))

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """See `TensorSource.check`."""
        self._source.check(self._stored(name), shape)

    def read(self, name: str, dtype: torch.dtype, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """See `TensorSource.read`."""
        return self._source.read(self._stored(name), dtype, rows, columns)

    def coded(self, name: str, rows: slice | None = None, columns: slice | None = None) -> CodedMatrix | None:
        """See `TensorSource.coded`."""
        return self._source.coded(self._stored(name), rows, columns)

    def _stored(self, name: str) -> str:
        return OF_LAYER.sub(lambda found: _named(int(found[1]) + self._layers.start), name, count=1)


def shares_of_stage(shares: Shares, layers: range) -> Shares:
    """Returns the shares of a stage's tensors by the names of `StageTensors`, of those of the whole model."""
    named = ((_own_name(name, layers), share) for name, share in shares.items())
    return {name: share for name, share in named if name is not None}


def _own_name(name: str, layers: range) -> str | None:
    """Returns the name of a tensor in its stage; None: its layer is another stage's."""
    found = OF_LAYER.search(name)
    if found is None:
        return name
    layer = int(found[1])
    return name[: found.start()] + _named(layer - layers.start) + name[found.end() :] if layer in layers else None


def _named(layer: int) -> str:
    return f".layers.{layer}."
