"""Linear layers whose products are brought by whoever loads the model."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.engine.models.architectures import parse_model_config
from services.engine.models.checkpoint import Checkpoint
from services.engine.models.linear import Linear
from services.engine.models.makers import Makers
from services.engine.models.opt import OptWeights
from services.engine.models.registry import load_weights
from services.engine.models.weights import DecoderWeights
from services.protocol.model_files.open import open_model
from tests.checkpoints import write_checkpoint


class Doubled:
    """A product that can be told from the plain one: twice x W^T, plus b."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = 2 * weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        y = x @ self._weight.T
        return y if self._bias is None else y + self._bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_that_is_brought_multiplies(dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((5, 16), (24, 16), (24,)))
    for b in (bias, None):
        linear, doubled = Linear(weight, b, fused=True, make_product=Doubled), Doubled(weight, b)
        assert not linear.is_kernel
        assert torch.equal(linear(x), doubled(x))
        assert torch.equal(linear.gated(x, lambda y: y[:, :12] - y[:, 12:]), doubled(x)[:, :12] - doubled(x)[:, 12:])


@pytest.mark.parametrize("family", ["qwen2", "opt"])
def test_it_is_for_all_layers_but_the_output(family: str, tmp_path: Path) -> None:
    """With the rows of Q, K and V in one product, and their biases."""
    directory = write_checkpoint(tmp_path / "model", family)
    config, made = parse_model_config(open_model(directory).config()), []

    def record(weight: Tensor, bias: Tensor | None) -> Doubled:
        made.append((tuple(weight.shape), bias is not None))
        return Doubled(weight, bias)

    with Checkpoint(directory) as checkpoint:
        weights = load_weights(checkpoint, config, torch.float32, makers=Makers(product=record))
    head = (config.vocab_size, config.hidden_size)
    if isinstance(weights, DecoderWeights):
        expected = [((128, 64), True), ((64, 64), False), ((192, 64), False), ((64, 96), False)]
    else:
        assert isinstance(weights, OptWeights)
        expected = [((192, 64), True), ((64, 64), True), ((96, 64), True), ((64, 96), True)]
    assert made == expected * config.num_layers
    assert head not in [shape for shape, _ in made]
