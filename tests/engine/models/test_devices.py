"""A model runs where its weights are: nothing of a forward pass is on another device than its inputs.

Torch's meta device, on which there are shapes and no numbers, is the other one. Operations refuse to mix devices; what
may be mixed (an index, a number) is looked for in everything that is called.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.engine.attention.by_layer import Windows
from services.engine.kernels.torch_operations import TorchOperations
from services.engine.models.architectures import parse_model_config, shapes_of
from services.engine.models.base import ModelInput
from services.engine.models.linear import Linear
from services.engine.models.registry import load_weights, make_model
from services.engine.models.shapes import Shapes
from services.engine.models.tensor_source import index_of
from services.protocol.model_files.open import open_model
from tests.checkpoints import LLAMA3_ROPE, YARN_ROPE, write_checkpoint

META = torch.device("meta")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3-rope-tied": ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen3": ("qwen3", {}),
    "opt": ("opt", {}),
    "opt-norm-after-projected": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
}


class MetaTensors:
    """A `TensorSource` without numbers."""

    lends = False

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self.names = frozenset(shapes)

    def home(self, name: str) -> str:
        return "nowhere"

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        assert self._shapes[name] == shape

    def read(self, name: str, dtype: torch.dtype, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        return torch.empty(self._shapes[name], dtype=dtype, device=META)[index_of(rows, columns)]

    def coded(self, name: str, rows: slice | None = None, columns: slice | None = None) -> None:
        return None


class NoAttention:
    """An `Attention` that keeps nothing."""

    writes_by_kernel = False
    rotate_and_write = None

    def prepare(self, queries: object, windows: Windows = None) -> None:
        return None

    def narrow(self, plan: object, tokens: Tensor, layer: int) -> None:
        return None

    def kernel_inputs(self, plan: object) -> None:
        return None

    def write(self, plan: object, layer: int, k: Tensor, v: Tensor) -> None:
        assert k.shape == v.shape

    def attend(self, plan: object, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)


class OnlyMeta(TorchDispatchMode):  # type: ignore[misc]  # of torch, which is not analysed
    """Raises where an operation takes or makes a tensor on another device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, Tensor)]
        assert all(tensor.device == META for tensor in tensors), f"{func} is not on the weights' device alone"
        return made


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_pass_stays_on_the_weights_device(name: str, tmp_path: Path) -> None:
    family, options = MODELS[name]
    config = parse_model_config(open_model(write_checkpoint(tmp_path / "model", family, **options)).config())
    weights = load_weights(MetaTensors(shapes_of(config)), config, torch.bfloat16)
    model = make_model(config, weights, NoAttention(), TorchOperations())
    tokens = torch.empty(7, dtype=torch.int64, device=META)
    positions = torch.empty(7, dtype=torch.int32, device=META)
    with OnlyMeta():
        step = ModelInput(tokens, positions, torch.empty(3, dtype=torch.int32, device=META), None, queries=None)
        assert model.all_logits(step).shape == (7, config.vocab_size)
        assert model.forward(step).shape == (7, config.output_size)
        hidden = model.forward(replace(step, queries=torch.empty(3, dtype=torch.int64, device=META)))
        assert model.logits(hidden).shape == (3, config.vocab_size)


def test_a_weight_is_packed_for_onednn_on_the_cpu_alone() -> None:
    linear = Linear(torch.empty(64, 32, dtype=torch.bfloat16, device=META), None, fused=True)
    assert not linear.is_kernel
    assert linear(torch.empty(3, 32, dtype=torch.bfloat16, device=META)).shape == (3, 64)
