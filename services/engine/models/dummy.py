"""Random weights for a model of which only config.json is there: it has its real shapes without a download.

The answers of such a model are noise; a step costs as much as with the real weights.
"""

import json
from hashlib import blake2b

import torch
from torch import Tensor

from services.engine.models.model_config import ModelConfig, described
from services.engine.models.shapes import Shapes
from services.engine.models.tensor_source import index_of
from services.engine.quantization.codes import CodedMatrix

_OF_EXPERTS = 3  # dimensions of a tensor of all experts


class DummyTensors:
    """A `TensorSource` that makes each tensor on its device when it is read, so that there is never a second copy.

    A tensor depends on its name, shape and dtype alone, so workers on the same kind of device have the same weights.
    """

    lends = False

    def __init__(self, config: ModelConfig, shapes: Shapes, device: torch.device) -> None:
        """shapes: those of the tensors that a checkpoint with this config would have."""
        self._dtype = torch.bfloat16 if config.dtype is None else getattr(torch, config.dtype)
        self._shapes = shapes
        self._device = device

    @property
    def names(self) -> frozenset[str]:
        """See `TensorSource.names`."""
        return frozenset(self._shapes)

    def home(self, name: str) -> str:
        """See `TensorSource.home`."""
        return "dummy weights"

    def dtype(self, name: str) -> torch.dtype:
        """Returns config.json's dtype, else bfloat16."""
        return self._dtype

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Does nothing: the tensors have the shapes that are asked for."""
        assert self._shapes[name] == shape, (name, shape)

    def read(self, name: str, dtype: torch.dtype, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """See `TensorSource.read`. A matrix is normal with variance 1 / inputs, so that activations keep their size;
        norms are ones and biases zeros. A residual stream then grows as the square root of the number of layers.

        A part is cut out of the whole tensor, so that ranks have the weights of the whole model. Of a tensor of all
        experts each is made by itself.
        """
        if len(self._shapes[name]) == _OF_EXPERTS:
            return self._make_experts(name, dtype, rows, columns)
        whole = self._make(name, self._shapes[name], dtype)
        return whole if rows is None and columns is None else whole[index_of(rows, columns)].clone()

    def coded(self, name: str, rows: slice | None = None, columns: slice | None = None) -> CodedMatrix | None:
        """Returns None: random weights are numbers."""
        return None

    def _make_experts(self, name: str, dtype: torch.dtype, rows: slice | None, columns: slice | None) -> Tensor:
        num_experts, *shape = self._shapes[name]
        experts = range(num_experts)[rows or slice(None)]
        made = [self._make(f"{name}.{expert}", tuple(shape), dtype)[columns or slice(None)] for expert in experts]
        return torch.stack(made)

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        if tensor.dim() == 1:
            return tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
        generator = torch.Generator(self._device).manual_seed(_seed(name))
        return tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)


def dummy_id(config: ModelConfig, device: torch.device) -> str:
    """Returns an id in the form of `weights_id`, 32 hex digits. Kinds of devices differ in it, as in their random
    numbers.
    """
    facts = {"dummy": device.type, **described(config)}
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _seed(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
