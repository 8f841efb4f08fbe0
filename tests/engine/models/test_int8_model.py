"""A model whose weights and activations are int8 computes what `transformers` does with both rounded in float32."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from services.config import DeviceKind, Dtype, Quantization
from services.config.engine import EngineConfig
from services.engine.runner.load import load_runner
from tests.checkpoints import write_checkpoint
from tests.engine.oracle import Reference, prompts_of
from tests.engine.stepping import Row, run_greedy

LENGTHS, NUM_TOKENS, NUM_LOGPROBS = [1, 37, 150], 8, 20


def rounded_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, int8, and a scale for each row."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scales).round().to(torch.int8), scales


class Rounded(nn.Module):  # type: ignore[misc]
    """A linear layer whose weight and, if asked for, whose input are those that codes mean, in float32."""

    def __init__(self, linear: nn.Linear, *, with_inputs: bool) -> None:
        super().__init__()
        codes, scales = rounded_weight(linear.weight.detach())
        self._weight, self._bias, self._with_inputs = codes.float() * scales, linear.bias, with_inputs

    def forward(self, x: Tensor) -> Tensor:
        if self._with_inputs:
            largest = x.abs().amax(dim=-1, keepdim=True)
            x = (x * (torch.full_like(largest, 127) / largest)).round() * (largest / 127)
        return functional.linear(x, self._weight, self._bias)


def reference(directory: Path, *, with_inputs: bool) -> Reference:
    found = Reference(directory)
    layers = [module for name, module in found._model.named_modules() if name.endswith(("self_attn", "mlp"))]
    for layer in layers:
        for name, linear in list(layer.named_children()):
            if isinstance(linear, nn.Linear):
                setattr(layer, name, Rounded(linear, with_inputs=with_inputs))
    return found


def logprobs_of(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """The likeliest tokens where one was generated, and their log-probabilities, [tokens, NUM_LOGPROBS] each."""
    found = [(ids, values) for row in rows for _, ids, values in row.logprobs]
    return torch.tensor([ids for ids, _ in found]), torch.tensor([values for _, values in found])


def scores(model: Reference, rows: list[Row]) -> Tensor:
    """Log-probabilities of what follows each token before a generated one, [tokens, vocab]."""
    return torch.cat([model.scores(row.tokens)[row.num_prompt - 1 :] for row in rows])


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_that_is_quantized_when_it_is_loaded(family: str, tmp_path: Path) -> None:
    """In float32, in chunks and recorded steps. Here and there the last bits of a number decide its code, which moves
    all that follows; never as far as rounding inputs does, and most tokens have no such number.
    """
    directory = write_checkpoint(tmp_path / "model", family, hidden_size=128, head_dim=32, intermediate_size=192)
    engine = EngineConfig(
        model=directory,
        device=DeviceKind.CPU,
        dtype=Dtype.FLOAT32,
        quantization=Quantization.INT8,
        kv_memory_bytes=4 << 20,
        num_threads=1,
    )
    loaded = load_runner(engine)
    assert not any("unpacked" in notice for notice in loaded.notices)
    rows = run_greedy(loaded.runner, prompts_of(LENGTHS), NUM_TOKENS, chunk=100, num_logprobs=NUM_LOGPROBS)
    exact, of_weights = (reference(directory, with_inputs=with_inputs) for with_inputs in (True, False))
    ids, found = logprobs_of(rows)
    assert found.shape == (len(LENGTHS) * NUM_TOKENS, NUM_LOGPROBS)
    expected = scores(exact, rows)
    differences = (found - expected.gather(1, ids)).abs().amax(dim=1)
    of_inputs = (scores(of_weights, rows) - expected).gather(1, ids).abs().amax(dim=1)
    assert differences.median() < 0.02 * of_inputs.median()
    assert differences.max() < of_inputs.max()
    generated = torch.tensor([token for row in rows for token in row.generated])
    assert (generated == expected.argmax(dim=1)).float().mean() > 0.9
