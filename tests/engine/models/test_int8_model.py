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

LENGTHS, NUM_TOKENS, VOCAB = [1, 37, 150], 8, 320


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


def logprobs_of(row: Row) -> Tensor:
    """[tokens, vocab]"""
    found = torch.empty(len(row.logprobs), VOCAB)
    for at, (_, ids, values) in enumerate(row.logprobs):
        found[at, torch.tensor(ids)] = torch.tensor(values)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_that_is_quantized_when_it_is_loaded(family: str, tmp_path: Path) -> None:
    """In float32, in chunks and recorded steps. A code that the last bits of its number decide moves all that follows
    a little, but far less than rounding inputs does.
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
    rows = run_greedy(loaded.runner, prompts_of(LENGTHS), NUM_TOKENS, chunk=100, num_logprobs=VOCAB)
    exact, of_weights = (reference(directory, with_inputs=with_inputs) for with_inputs in (True, False))
    for row in rows:
        prompt = row.tokens[: row.num_prompt]
        tokens, expected = exact.run(prompt, NUM_TOKENS)
        _, others = of_weights.run(prompt, NUM_TOKENS)
        assert row.generated == tokens
        assert (logprobs_of(row) - expected).abs().max() < 0.1 * (others - expected).abs().max()
