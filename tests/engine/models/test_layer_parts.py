"""A family whose layers have another MLP brings that part, and the decoder stays as it is."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from services.config import DeviceKind, Kernels
from services.config.engine import EngineConfig
from services.engine.models import architectures, registry
from services.engine.models.config import DecoderConfig, layer_prefix
from services.engine.models.families import FAMILIES
from services.engine.models.model_config import Shard
from services.engine.models.part_tensors import PartTensors
from services.engine.models.parts import ReluMlp
from services.engine.models.shapes import Shapes, Shares, linear_shapes, shares_of_inputs, shares_of_outputs
from services.engine.models.tensors import Tensors
from services.engine.models.weights import LayerParts
from services.engine.runner.load import load_runner
from tests.checkpoints import edit_json
from tests.engine.oracle import prompts_of
from tests.engine.stepping import run_greedy


class PlainMlp(nn.Module):  # type: ignore[misc]  # of torch, which is not analysed
    """An MLP without a gate, with a bias on the way up alone."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).relu())


def plain_shapes(config: DecoderConfig, layer: int) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    return linear_shapes("mlp.fc1", inner, hidden, True) | linear_shapes("mlp.fc2", hidden, inner, False)


def plain_shares(config: DecoderConfig, shard: Shard, layer: int) -> Shares:
    return shares_of_outputs("mlp.fc1", shard.intermediate, True) | shares_of_inputs(
        "mlp.fc2", shard.intermediate, False
    )


def load_plain(tensors: Tensors, config: DecoderConfig, layer: int) -> ReluMlp:
    prefix = layer_prefix(layer)
    up, down = tensors.linear(f"{prefix}mlp.fc1", bias=True), tensors.linear(f"{prefix}mlp.fc2", bias=False)
    return ReluMlp(up, down, config.intermediate_size)


@pytest.mark.parametrize("kernels", list(Kernels))
def test_a_family_with_another_mlp_adds_that_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Kernels
) -> None:
    name, family = (
        "PlainForCausalLM",
        replace(FAMILIES["LlamaForCausalLM"], mlp=PartTensors(plain_shapes, plain_shares)),
    )
    monkeypatch.setitem(FAMILIES, name, family)
    shape = architectures.SHAPES["LlamaForCausalLM"]
    monkeypatch.setitem(architectures.SHAPES, name, shape)
    monkeypatch.setitem(registry.ARCHITECTURES, name, registry.decoder(LayerParts(mlp=load_plain)))
    torch.manual_seed(4)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    for layer in theirs.model.layers:
        layer.mlp = PlainMlp(theirs.config)
    theirs.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", architectures=[name])
    engine = EngineConfig(
        model=tmp_path, device=DeviceKind.CPU, kv_memory_bytes=1 << 20, kernels=kernels, num_threads=1
    )
    runner = load_runner(engine).runner
    for row in run_greedy(runner, prompts_of([7, 40]), 12, chunk=16):
        with torch.inference_mode():
            logits = theirs(torch.tensor([row.tokens])).logits[0]
        expected = logits[row.num_prompt - 1 : -1].argmax(dim=1).tolist()
        assert row.generated == expected
