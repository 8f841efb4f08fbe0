"""Loading a model directory: what is wrong with it is said in one line, and what was chosen is reported."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.config import DeviceKind, Kernels
from services.config.engine import EngineConfig
from services.engine.models.architectures import parse_model_config
from services.engine.models.registry import weight_files
from services.engine.models.weight_files import weights_id
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.runner.load import LoadedModel, load_runner
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.open import open_model
from tests.checkpoints import FAMILIES, edit_json, save_tensors, write_checkpoint
from tests.engine.stepping import run_greedy

GATE = "model.layers.1.mlp.gate_proj.weight"


def load(directory: Path, **options: Any) -> LoadedModel:
    chosen = {"device": DeviceKind.CPU, "kv_memory_bytes": 4 << 20, "num_threads": 1, **options}
    return load_runner(EngineConfig(model=directory, **chosen))


def refusal(directory: Path, **options: Any) -> str:
    """The one line with which loading fails."""
    with pytest.raises(ModelError) as caught:
        load(directory, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), max_shard_size="60KB")


@pytest.fixture
def sharded(original: Path, tmp_path: Path) -> Path:
    """A checkpoint in several files, to be spoiled."""
    shutil.copytree(original, tmp_path / "model")
    return tmp_path / "model"


def shard_of(directory: Path, tensor: str) -> Path:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    name: str = index["weight_map"][tensor]
    return directory / name


def change_tensor(directory: Path, tensor: str, value: torch.Tensor | None) -> Path:
    """Replaces a tensor, or removes it."""
    path = shard_of(directory, tensor)
    tensors = load_file(path)
    del tensors[tensor]
    save_tensors(path, tensors if value is None else tensors | {tensor: value})
    return path


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{oops")
    assert "not valid JSON" in refusal(tmp_path)


def test_an_unknown_architecture(sharded: Path) -> None:
    edit_json(sharded / "config.json", architectures=["FalconForCausalLM"])
    assert "FalconForCausalLM" in refusal(sharded)


def test_a_missing_tensor(sharded: Path) -> None:
    change_tensor(sharded, GATE, None)
    assert GATE in (message := refusal(sharded))
    assert "missing" in message


def test_a_wrong_shape(sharded: Path) -> None:
    path = change_tensor(sharded, GATE, torch.zeros(95, 64))
    message = refusal(sharded)
    assert all(part in message for part in (path.name, GATE, "[95, 64]", "[96, 64]"))


def test_an_unexpected_tensor(sharded: Path) -> None:
    """A bias that config.json does not speak of would change the result: it is not left out in silence."""
    path = shard_of(sharded, GATE)
    save_tensors(path, load_file(path) | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    assert "q_proj.bias" in refusal(sharded)


@pytest.mark.few(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_model_may_store_its_head_if_it_is_the_embedding(family: str, tmp_path: Path) -> None:
    """Where it is not, `transformers` takes the head, its older versions and others the embedding."""
    directory = write_checkpoint(tmp_path / "model", family, tie_word_embeddings=True)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    embedding = next(value for name, value in tensors.items() if name.endswith("embed_tokens.weight"))
    save_tensors(path, tensors | {"lm_head.weight": embedding.clone()})
    load(directory)
    for changed in (embedding + torch.eye(*embedding.shape) * 1e-3, embedding[1:]):
        save_tensors(path, tensors | {"lm_head.weight": changed.clone()})
        assert "lm_head.weight" in refusal(directory)
    save_tensors(path, tensors | {"lm_head.weight": 2 * embedding})
    assert "tie_word_embeddings" in refusal(directory)


def test_a_tensor_of_integers(sharded: Path) -> None:
    path = change_tensor(sharded, GATE, torch.zeros(96, 64, dtype=torch.int8))
    assert all(part in refusal(sharded) for part in (path.name, GATE, "I8"))


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_file(kept: int, sharded: Path) -> None:
    path = shard_of(sharded, GATE)
    raw = path.read_bytes()
    path.write_bytes(raw[:kept])
    message = refusal(sharded)
    assert path.name in message
    assert "truncated" in message


def test_a_file_of_something_else(sharded: Path) -> None:
    path = shard_of(sharded, GATE)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert path.name in refusal(sharded)


def test_a_missing_shard(sharded: Path) -> None:
    path = shard_of(sharded, GATE)
    path.unlink()
    message = refusal(sharded)
    assert path.name in message
    assert "missing" in message


def test_pickled_weights_are_refused(sharded: Path) -> None:
    for path in sharded.glob("*.safetensors*"):
        path.unlink()
    assert "no weights" in refusal(sharded)
    (sharded / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "only safetensors are read" in refusal(sharded)


def test_a_length_beyond_the_models(sharded: Path) -> None:
    assert "513" in refusal(sharded, max_model_len=513)


def test_too_little_memory(sharded: Path) -> None:
    assert "KV memory" in refusal(sharded, kv_memory_bytes=1000)
    assert "GiB" in refusal(sharded, kv_memory_bytes=1 << 50)


def test_a_dtype_that_is_not_supported(sharded: Path) -> None:
    assert "'float8' is not supported" in refusal(sharded, dtype="float8")


def test_a_pool_smaller_than_the_context_lowers_it_and_says_so(sharded: Path) -> None:
    block_bytes = load(sharded).runner.layout.block_bytes
    loaded = load(sharded, kv_memory_bytes=10 * block_bytes + 5)
    assert (loaded.runner.num_blocks, loaded.max_model_len) == (10, 160)
    assert "from 512 to 160" in loaded.notices[0]
    assert load(sharded, kv_memory_bytes=10 * block_bytes, max_model_len=100).notices == ()


def test_limits_and_ids_come_from_the_directory(sharded: Path) -> None:
    edit_json(sharded / "generation_config.json", eos_token_id=[7, 1])
    loaded = load(sharded)
    assert (loaded.max_model_len, loaded.vocab_size, loaded.eos_token_ids) == (512, 320, (1, 7))


def test_ids_that_are_no_tokens_end_no_answer(sharded: Path) -> None:
    """Where answers must not end yet, or are restricted, each EOS id is a bit of a mask."""
    edit_json(sharded / "config.json", eos_token_id=320)
    edit_json(sharded / "generation_config.json", eos_token_id=[7, 400, -1])
    loaded = load(sharded)
    assert loaded.eos_token_ids == (7,)
    assert loaded.notices == ("no answer ends with eos_token_id 320, 400, -1: vocab_size is 320",)


@pytest.mark.parametrize("differs", [False, True])
def test_a_tied_head_with_nan_is_compared_by_its_bits(differs: bool, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    embedding[300] = math.nan
    tensors["lm_head.weight"] = embedding.clone()
    tensors["lm_head.weight"][7, 7] += 1.0 if differs else 0.0
    save_tensors(path, tensors)
    if differs:
        assert "lm_head.weight differs from the embedding" in refusal(directory)
    else:
        load(directory)


def test_the_pool_by_default_is_a_quarter_of_free_memory_at_most(sharded: Path) -> None:
    """And untouched memory costs nothing."""
    runner = load(sharded, kv_memory_bytes=None).runner
    assert 0 < runner.num_blocks * runner.layout.block_bytes <= 4 << 30
    assert isinstance(runner, TorchRunner)
    assert not runner.kv_memory().array[-1].any()


def test_dtype_auto_is_the_checkpoints(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "bf16", dtype=torch.bfloat16)
    assert load(directory).runner.layout.dtype == "bfloat16"
    assert load(directory, dtype="float32").runner.layout.dtype == "float32"
    edit_json(directory / "config.json", drop=("dtype", "torch_dtype"))
    assert load(directory).runner.layout.dtype == "bfloat16"


def test_float16_runs_in_float16_and_auto_says_what_it_costs(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "f16", dtype=torch.float16)
    by_auto, asked = load(directory), load(directory, dtype="float16")
    assert by_auto.runner.layout.dtype == asked.runner.layout.dtype == "float16"
    assert "dtype bfloat16 is faster" in by_auto.notices[0]
    assert asked.notices == ()


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_checkpoint_that_was_saved_without_its_head(family: str, tmp_path: Path) -> None:
    """Its tensors lack the prefix "model."; they are the same model."""
    directory = write_checkpoint(tmp_path / "model", family, tie_word_embeddings=True)
    whole = load(directory)
    path = directory / "model.safetensors"
    save_tensors(path, {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()})
    bare = load(directory)
    rows = [run_greedy(each.runner, [[5, 6, 7]], 5, chunk=9)[0] for each in (whole, bare)]
    assert rows[0].generated == rows[1].generated
    tensors = load_file(path)
    del tensors[next(name for name in tensors if "layers.1" in name)]
    save_tensors(path, tensors)
    assert "is missing" in refusal(directory)


def test_weights_id_tells_weights_apart(tmp_path: Path) -> None:
    """Equal shapes with other values, or another norm epsilon, are other models; a copy is the same one."""
    first = write_checkpoint(tmp_path / "first", seed=1)
    second = write_checkpoint(tmp_path / "second", seed=2)
    copy = Path(shutil.copytree(first, tmp_path / "copy"))
    tuned = Path(shutil.copytree(first, tmp_path / "tuned"))
    tensors = load_file(tuned / "model.safetensors")
    tensors[GATE] *= 1.01
    save_tensors(tuned / "model.safetensors", tensors)
    other_eps = Path(shutil.copytree(first, tmp_path / "eps"))
    edit_json(other_eps / "config.json", rms_norm_eps=1e-5)

    def identity(directory: Path) -> str:
        return weights_id(weight_files(directory), parse_model_config(open_model(directory).config()))

    assert identity(copy) == identity(first)
    assert len({identity(directory) for directory in (first, second, tuned, other_eps)}) == 4


def test_fingerprints_differ_by_what_makes_kv_incompatible(sharded: Path) -> None:
    found = {
        load(sharded, **options).fingerprint
        for options in ({}, {"block_size": 32}, {"dtype": "bfloat16"}, {"kv_memory_bytes": 2 << 20})
    }
    assert len(found) == 3, "the size of the pool is no part of it"


@pytest.mark.parametrize("family", FAMILIES)
def test_progress_ends_with_the_bytes_that_it_began_with(family: str, tmp_path: Path) -> None:
    heard: list[tuple[str, int | None]] = []

    class Heard:
        def stage(self, name: str, num_bytes: int | None = None) -> None:
            heard.append((name, num_bytes))

        def advance(self, num_bytes: int) -> None:
            heard.append(("read", num_bytes))

    model = write_checkpoint(tmp_path, family, tie_word_embeddings=family == "opt")
    load_runner(EngineConfig(model=model, kv_memory_bytes=1 << 20, kernels=Kernels.TORCH), Heard())
    stages = [(name, num_bytes) for name, num_bytes in heard if name != "read"]
    read = sum(num_bytes or 0 for name, num_bytes in heard if name == "read")
    assert stages == [("reading weights", read), ("preparing kernels", None)]
