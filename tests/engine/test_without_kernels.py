"""Where there are no kernels, torch's operations compute a model, and the worker says so."""

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.config import DeviceKind
from services.config.engine import EngineConfig
from services.engine.kernels.cpu import isa
from services.engine.runner.load import load_runner
from tests.checkpoints import write_checkpoint


@pytest.fixture
def on_arm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process, as if its processor were one of ARM's."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    for cached in (isa.host_features, isa.this_isa):
        cached.cache_clear()
    yield
    for cached in (isa.host_features, isa.this_isa):
        cached.cache_clear()


@pytest.mark.usefixtures("on_arm")
def test_another_architecture_runs_on_torch_and_says_so(tmp_path: Path) -> None:
    loaded = load_runner(config(write_checkpoint(tmp_path / "model")))
    assert loaded.kernels == "torch"
    assert loaded.notices == (
        "torch's operations are used, kernels would be faster: there are none for this processor",
    )


@pytest.mark.parametrize("options", [{"kernels": "torch"}, {"dtype": "float16"}], ids=str)
def test_a_model_without_kernels_is_torchs(options: dict[str, str], tmp_path: Path) -> None:
    assert load_runner(config(write_checkpoint(tmp_path / "model"), **options)).kernels == "torch"


def config(directory: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=directory, device=DeviceKind.CPU, kv_memory_bytes=8 << 20, num_threads=1, **options)
