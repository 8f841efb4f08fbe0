"""`--quantization int8` and `int4`: which weights it takes, a rank's share of them, and a model with them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.config import Quantization
from services.config.engine import EngineConfig
from services.engine.models.architectures import parse_model_config, shapes_of
from services.engine.models.quantized.at_load import QuantizedAtLoad
from services.engine.models.registry import load_weights, open_tensors
from services.engine.models.tensor_source import TensorSource
from services.engine.quantization.rounding import to_int4, to_int8
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.runner.load import load_runner
from services.engine.runner.load_plan import plan_load
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.open import open_model
from tests.checkpoints import FAMILIES, save_tensors, write_checkpoint
from tests.engine.models.test_shares import parts
from tests.engine.oracle import Reference, prompts_of
from tests.engine.stepping import run_greedy
from tests.quantized_checkpoints import awq, write_quantized

CPU = torch.device("cpu")
QUANTIZE = {Quantization.INT8: to_int8, Quantization.INT4: to_int4}
LEFT = (
    "embed_tokens.weight",
    "embed_positions.weight",
    "lm_head.weight",
    "gate.weight",
    "router.weight",
    "kv_b_proj.weight",
)
LATENTS = "kv_a_proj_with_mqa.weight"


@pytest.fixture(params=QUANTIZE)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TensorSource]:
    path = write_checkpoint(tmp_path / "checkpoint")
    with open_tensors(path, parse_model_config(open_model(path).config()), CPU) as plain:
        yield QuantizedAtLoad(plain, QUANTIZE[request.param])


@pytest.mark.few(2)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_linear_layers_and_experts_are_quantized_and_nothing_else(family: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", family)
    config = parse_model_config(open_model(path).config())
    with open_tensors(path, config, CPU) as plain:
        source = QuantizedAtLoad(plain, to_int4)
        for name, shape in shapes_of(config).items():
            whole = plain.read(name, torch.float32)
            is_left = len(shape) == 1 or name.endswith((*LEFT, LATENTS, "_bias", "shared_expert_gate.weight"))
            assert torch.equal(source.read(name, torch.float32), whole) == is_left, name
            if len(shape) == 2:
                assert (source.coded(name) is None) == is_left, name


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_part_is_that_of_the_whole(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "shares of rounded"
    if not path.exists():
        write_checkpoint(path)
    name = f"model.layers.0.{data.draw(st.sampled_from(['mlp.down_proj', 'self_attn.o_proj']))}.weight"
    with open_tensors(path, parse_model_config(open_model(path).config()), CPU) as plain:
        source = QuantizedAtLoad(plain, QUANTIZE[data.draw(st.sampled_from(sorted(QUANTIZE)))])
        whole = source.read(name, torch.float32)
        rows, columns = (data.draw(parts(size)) for size in whole.shape)
        expected = whole[rows or slice(None)][:, columns or slice(None)]
        assert torch.equal(source.read(name, torch.float32, rows, columns), expected)
        if (matrix := source.coded(name, rows, columns)) is not None:
            assert torch.equal(matrix.numbers(torch.float32), expected)


def test_columns_that_begin_with_a_group_have_its_scales(source: TensorSource) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    whole = source.read(name, torch.float32)
    for begin in (32, 64):
        matrix = source.coded(name, None, slice(begin, whole.shape[1]))
        assert matrix is not None
        assert torch.equal(matrix.numbers(torch.float32), whole[:, begin:])


def test_a_model_has_the_logprobs_of_transformers_over_these_numbers(source: TensorSource, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    config = parse_model_config(open_model(path).config())
    runner = TorchRunner(config, load_weights(source, config, torch.float32), 32, 16, fused=False)
    numbers = {name: source.read(name, torch.float32).clone() for name in source.names}
    save_tensors(path / "model.safetensors", numbers)
    reference, prompts = Reference(path), prompts_of([3, 40])
    for row, prompt in zip(run_greedy(runner, prompts, 8, 32, num_logprobs=0), prompts, strict=True):
        tokens, logprobs = reference.run(prompt, 8)
        assert row.generated == tokens
        found = torch.tensor([logprob for logprob, _, _ in row.logprobs])
        assert torch.allclose(found, logprobs[torch.arange(8), tokens], atol=1e-3)


def options(path: Path, quantization: Quantization, **more: Any) -> EngineConfig:
    return EngineConfig(model=path, quantization=quantization, kv_memory_bytes=4 << 20, num_threads=1, **more)


@pytest.mark.parametrize("quantization", QUANTIZE)
def test_it_is_refused_where_no_kernel_multiplies_what_it_makes(quantization: Quantization, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ModelError, match=f"--quantization {quantization}: no kernel here multiplies such weights"):
        load_runner(options(path, quantization, kernels="torch"))


def test_it_is_refused_for_what_is_quantized_and_for_encoders(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    write_quantized(tmp_path / "quantized", checkpoint, awq(32))
    for quantization in Quantization:
        if quantization is not Quantization.NONE:
            with pytest.raises(ModelError, match=r"is quantized already \(awq\)|is for GPUs alone"):
                plan_load(options(tmp_path / "quantized", quantization))
    encoder = write_checkpoint(tmp_path / "encoder", "bert")
    with pytest.raises(ModelError, match="--quantization int8 is not there for models that see both ways"):
        plan_load(EngineConfig(model=encoder, quantization=Quantization.INT8))


def test_fleets_that_exchange_kv_quantize_alike(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint")
    prints = {plan_load(options(path, quantization)).fingerprint() for quantization in (Quantization.NONE, *QUANTIZE)}
    assert len(prints) == 3
