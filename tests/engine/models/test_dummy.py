"""Random weights in a checkpoint's stead: config.json is enough, and every worker makes the same ones."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.config import DeviceKind, LoadFormat
from services.config.engine import EngineConfig
from services.engine.models.architectures import parse_model_config
from services.engine.models.registry import open_tensors
from services.engine.runner.load import LoadedModel, load_runner
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.open import open_model
from tests.checkpoints import edit_json, write_checkpoint
from tests.engine.stepping import run_greedy

CPU = torch.device("cpu")


@pytest.fixture(params=["llama", "qwen3", "opt"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """config.json alone."""
    return write_config(tmp_path, request.param)


def write_config(tmp_path: Path, family: str = "llama", **config: Any) -> Path:
    whole, bare = write_checkpoint(tmp_path / "whole", family, **config), tmp_path / "bare"
    bare.mkdir()
    shutil.copy(whole / "config.json", bare)
    return bare


def load(directory: Path, **options: Any) -> LoadedModel:
    chosen = {
        "device": DeviceKind.CPU,
        "load_format": LoadFormat.DUMMY,
        "num_threads": 1,
        "kernels": "torch",
        **options,
    }
    return load_runner(EngineConfig(model=directory, kv_memory_bytes=4 << 20, **chosen))


def tensors_of(directory: Path, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
    with open_tensors(None, parse_model_config(open_model(directory).config()), CPU) as source:
        for name in sorted(source.names):
            yield name, source.read(name, dtype)


def test_config_json_is_enough(directory: Path) -> None:
    """And what is generated wanders, as a real model's text does."""
    rows = run_greedy(load(directory).runner, [[5, 6, 7], list(range(40))], 40, chunk=16, num_logprobs=1)
    assert all(len(set(row.generated)) > 10 for row in rows)
    with pytest.raises(ModelError, match="has no weights"):
        load(directory, load_format=LoadFormat.AUTO)


def test_two_workers_have_the_same_weights(directory: Path) -> None:
    for (name, one), (_, other) in zip(tensors_of(directory), tensors_of(directory), strict=True):
        assert torch.equal(one, other), name


def test_tensors_of_one_shape_differ_by_their_names(tmp_path: Path) -> None:
    found = dict(tensors_of(write_config(tmp_path)))
    gates = [found[f"model.layers.{layer}.mlp.{name}_proj.weight"] for layer in (0, 1) for name in ("gate", "up")]
    for index, gate in enumerate(gates):
        assert not any(torch.equal(gate, other) for other in gates[:index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matrices_keep_the_size_of_what_goes_through(dtype: torch.dtype, tmp_path: Path) -> None:
    """Norms are ones, biases zeros."""
    for name, tensor in tensors_of(write_config(tmp_path, "qwen2"), dtype):
        assert tensor.dtype == dtype
        if tensor.dim() == 2:
            assert abs(tensor.float().std() * tensor.shape[1] ** 0.5 - 1) < 0.05, name
        else:
            assert (tensor == (0 if name.endswith("bias") else 1)).all(), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_of_80_layers_stays_finite(dtype: str, tmp_path: Path) -> None:
    directory = write_config(tmp_path, num_hidden_layers=80)
    (row,) = run_greedy(load(directory, dtype=dtype).runner, [list(range(30))], 8, chunk=30, num_logprobs=4)
    assert len(row.logprobs) == 8
    assert all(np.isfinite([sampled, *top]).all() for sampled, _, top in row.logprobs)


def test_the_dtype_is_that_of_config_json_else_bfloat16(tmp_path: Path) -> None:
    directory = write_config(tmp_path, "llama")
    assert load(directory).runner.layout.dtype == "float32"
    edit_json(directory / "config.json", drop=("dtype", "torch_dtype"))
    assert load(directory).runner.layout.dtype == "bfloat16"


def test_dummies_of_one_shape_exchange_kv_and_with_nobody_else(tmp_path: Path) -> None:
    directory = write_config(tmp_path)
    other = Path(shutil.copytree(directory, tmp_path / "other"))
    edit_json(other / "config.json", rms_norm_eps=1e-3)
    same = Path(shutil.copytree(directory, tmp_path / "same"))
    real = load(tmp_path / "whole", load_format=LoadFormat.AUTO).fingerprint
    assert load(directory).fingerprint == load(same).fingerprint
    assert len({real, load(directory).fingerprint, load(other).fingerprint}) == 3
