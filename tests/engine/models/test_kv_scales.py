"""Scales of FP8 KV in a checkpoint: under the names that there are, for a layer or for each of its KV heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.config import DeviceKind
from services.config.engine import EngineConfig
from services.engine.models.architectures import parse_model_config
from services.engine.models.checkpoint import Checkpoint
from services.engine.models.kv_scales import KvScales, read_kv_scales
from services.engine.runner.load import load_runner
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.open import open_model
from tests.checkpoints import edit_json, save_tensors, write_checkpoint
from tests.engine.stepping import run_greedy

SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
KV_ONLY = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": SCHEME,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two layers with two KV heads."""
    return write_checkpoint(tmp_path / "model")


def add(directory: Path, **tensors: Any) -> Path:
    """Puts tensors into attention modules; in their names "L0_" is layer 0's, and "__" a dot."""
    path = directory / "model.safetensors"
    named = {
        f"model.layers.{name[1]}.self_attn.{name[3:].replace('__', '.')}": torch.as_tensor(value)
        for name, value in tensors.items()
    }
    save_tensors(path, load_file(path) | named)
    return directory


def scales_of(directory: Path) -> KvScales | None:
    with Checkpoint(directory) as checkpoint:
        return read_kv_scales(checkpoint, parse_model_config(open_model(directory).config()))


def load(directory: Path) -> Any:
    return load_runner(EngineConfig(model=directory, device=DeviceKind.CPU, kv_memory_bytes=4 << 20, num_threads=1))


def refusal(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        scales_of(directory)
    return str(caught.value)


def test_a_checkpoint_without_scales(directory: Path) -> None:
    assert scales_of(directory) is None


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_scale", "v_scale"),
        ("k_proj__k_scale", "v_proj__v_scale"),
        ("attn__k_scale", "attn__v_scale"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_scales_under_the_names_that_there_are(k: str, v: str, family: str, tmp_path: Path) -> None:
    """What there is none for is 1."""
    directory = write_checkpoint(tmp_path / "model", family, num_attention_heads=2)
    path, prefix = directory / "model.safetensors", "model.decoder" if family == "opt" else "model"
    k_name, v_name = (f"{prefix}.layers.{{}}.self_attn.{name.replace('__', '.')}" for name in (k, v))
    tensors = {k_name.format(1): torch.tensor(0.5), v_name.format(0): torch.tensor([0.25])}
    save_tensors(path, load_file(path) | tensors)
    scales = scales_of(directory)
    assert scales is not None
    assert (scales.k.dtype, scales.v.dtype) == (torch.float32, torch.float32)
    assert scales.values() == [[[1.0, 1.0], [0.5, 0.5]], [[0.25, 0.25], [1.0, 1.0]]]


def test_a_scale_for_each_kv_head(directory: Path) -> None:
    add(directory, L0_k_scale=torch.tensor([0.5, 2.0], dtype=torch.bfloat16), L1_v_scale=torch.full((2, 1, 1), 4.0))
    scales = scales_of(directory)
    assert scales is not None
    assert scales.values() == [[[0.5, 2.0], [1.0, 1.0]], [[1.0, 1.0], [4.0, 4.0]]]


def test_without_fp8_kv_they_change_nothing(directory: Path) -> None:
    """And a checkpoint with them is no other one than config.json describes."""
    plain = run_greedy(load(directory).runner, [[5, 6, 7]], 8, chunk=9)[0].generated
    add(directory, L0_k_scale=0.5, L1_v_proj__v_scale=0.125)
    assert run_greedy(load(directory).runner, [[5, 6, 7]], 8, chunk=9)[0].generated == plain


@pytest.mark.parametrize(
    "tensors",
    [{"L2_k_scale": 0.5}, {"L0_q_scale": 0.5}, {"L0_k_proj__v_scale": 0.5}, {"L0_k_scale_inv": 0.5}],
    ids=lambda tensors: next(iter(tensors)),
)
def test_what_is_no_scale_of_this_model_is_unexpected(tensors: dict[str, float], directory: Path) -> None:
    with pytest.raises(ModelError, match="is not part of LlamaForCausalLM"):
        load(add(directory, **tensors))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"L0_k_scale": torch.ones(3)}, "has 3 scales"),
        ({"L0_k_scale": 0.0}, "not a positive number"),
        ({"L0_k_scale": float("nan")}, "not a positive number"),
        ({"L0_k_scale": float("inf")}, "not a positive number"),
        ({"L0_k_scale": torch.ones(1, dtype=torch.int8)}, "stored as I8"),
        ({"L0_k_scale": 0.5, "L0_attn__k_scale": 0.5}, "is already"),
    ],
)
def test_scales_that_cannot_be_used(tensors: dict[str, Any], reason: str, directory: Path) -> None:
    message = refusal(add(directory, **tensors))
    assert reason in message
    assert "model.safetensors" in message
    assert "layers.0.self_attn" in message


def test_a_checkpoint_that_is_quantised_in_its_kv_alone_is_taken(directory: Path) -> None:
    edit_json(directory / "config.json", quantization_config=KV_ONLY)
    assert load(directory).vocab_size == 320


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_scheme": None},
        {"kv_cache_scheme": SCHEME | {"type": "int"}},
        {"kv_cache_scheme": SCHEME | {"dynamic": True}},
    ],
)
def test_any_other_quantisation_is_refused(changes: dict[str, Any], directory: Path) -> None:
    edit_json(directory / "config.json", quantization_config=KV_ONLY | changes)
    with pytest.raises(ModelError, match=r"quantization_config: (kv_cache_scheme|config_groups) "):
        load(directory)
