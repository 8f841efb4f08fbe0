"""Runners whose weights are shared compute what runners with weights of their own do, to the bit."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from services.config import DeviceKind, Kernels, Quantization, ShareWeights
from services.config.engine import EngineConfig
from services.engine.kernels.cpu import code_store, huge_pages
from services.engine.runner import share_choice
from services.engine.runner.load import LoadedModel, load_runner
from services.protocol.model_files.base import ModelError
from tests.checkpoints import write_checkpoint
from tests.engine.oracle import prompts_of
from tests.engine.sharing import Told
from tests.engine.stepping import run_greedy
from tests.engine.test_torch_runner import QUICK, SHAPES


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are shared in this test alone. Compiled kernels stay where they are."""
    code_store.the_code_store()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load_model(directory: Path, share: ShareWeights, told: Told | None = None, **options: Any) -> LoadedModel:
    chosen: dict[str, Any] = {"device": DeviceKind.CPU, "kv_memory_bytes": 8 << 20, **options}
    return load_runner(EngineConfig(model=directory, share_weights=share, **chosen), told)


def answers(loaded: LoadedModel) -> list[Any]:
    """Tokens and logprobs of some prompts."""
    rows = run_greedy(loaded.runner, prompts_of([3, 40]), 4, 32, num_logprobs=2)
    return [(row.tokens, row.logprobs) for row in rows]


@pytest.mark.few(4)
@pytest.mark.parametrize("shape", sorted(QUICK))
def test_all_families_share_their_weights(tmp_path: Path, shape: str) -> None:
    family, config = SHAPES[shape]
    directory = write_checkpoint(tmp_path / "model", family, **config)
    own = load_model(directory, ShareWeights.OFF)
    told = [Told(), Told()]
    shared = [load_model(directory, ShareWeights.ON, each) for each in told]
    assert own.weights.not_shared == "the configuration says so"
    assert [loaded.weights.not_shared for loaded in shared] == [None, None]
    assert [each.stages[0].split()[0] for each in told] == ["reading", "mapping"]
    assert answers(own) == answers(shared[0]) == answers(shared[1])


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("llama", Quantization.INT4),
        pytest.param("mixtral", Quantization.INT4, marks=pytest.mark.long),
        pytest.param("qwen2", Quantization.INT8, marks=pytest.mark.long),
    ],
)
def test_weights_in_codes_are_shared(tmp_path: Path, family: str, quantization: Quantization) -> None:
    tied: dict[str, Any] = {} if family == "mixtral" else {"tie_word_embeddings": True}
    directory = write_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16, **tied)
    own = load_model(directory, ShareWeights.OFF, quantization=quantization)
    told = [Told(), Told()]
    shared = [load_model(directory, ShareWeights.ON, each, quantization=quantization) for each in told]
    assert [each.stages[0].split()[0] for each in told] == ["reading", "mapping"]
    assert answers(own) == answers(shared[0]) == answers(shared[1])


def test_a_checkpoint_that_was_changed_in_place_is_not_the_one_that_is_shared(tmp_path: Path) -> None:
    """Its digest is made of samples, which may be the same."""
    directory = write_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    before = load_model(directory, ShareWeights.ON)
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2:] = b"\x00\x42"  # the last number of a norm or a matrix: 32
    file.write_bytes(content)
    told = Told()
    after = load_model(directory, ShareWeights.ON, told)
    assert told.stages[0] == "reading weights"
    assert answers(after) == answers(load_model(directory, ShareWeights.OFF)) != answers(before)


def test_without_room_in_shared_memory_weights_are_a_workers_own_with_one_notice(tmp_path: Path) -> None:
    """The limit is on sizes of files, those without names among them."""
    directory = write_checkpoint(tmp_path / "model")
    own = load_model(directory, ShareWeights.OFF)  # compiles kernels, whose files are small
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with capture_logs() as logs:
            loaded = load_model(directory, ShareWeights.ON)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert loaded.weights.not_shared == "no shared memory: file too large"
    assert [(each["log_level"], each["reason"]) for each in logs] == [("warning", "no shared memory: file too large")]
    assert answers(loaded) == answers(own)


def test_auto_shares_where_shared_memory_has_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_checkpoint(tmp_path / "model")
    monkeypatch.setattr(share_choice, "why_no_huge_pages", lambda: None)
    assert load_model(directory, ShareWeights.AUTO).weights.not_shared is None
    monkeypatch.setattr(share_choice, "why_no_huge_pages", lambda: "small pages")
    assert load_model(directory, ShareWeights.AUTO).weights.not_shared == "small pages"
    assert load_model(directory, ShareWeights.ON).weights.not_shared is None


def test_what_torch_computes_with_is_not_shared(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    loaded = load_model(directory, ShareWeights.AUTO, kernels=Kernels.TORCH)
    assert loaded.weights.not_shared == "torch computes, by weights of its own"
    with pytest.raises(ModelError, match="--share-weights on is for weights that kernels have packed"):
        load_model(directory, ShareWeights.ON, kernels=Kernels.TORCH)


def test_memory_for_weights_is_this_processs_own_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = huge_pages.WeightMemory()
    with pytest.raises(KeyError), memory.elsewhere(lambda _: pytest.fail("nothing is taken")):
        raise KeyError
    assert memory.empty(torch.Size((3,)), torch.float32).tolist() == [0, 0, 0]
