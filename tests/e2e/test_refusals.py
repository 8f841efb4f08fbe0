"""What cannot be served is refused in one line, before any port opens."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.processes import free_ports
from tests.checkpoints import edit_json, plant


def unknown_architecture(model: Path) -> str:
    edit_json(model / "config.json", architectures=["GptNeoForCausalLM"])
    return "GptNeoForCausalLM"


def truncated_file(model: Path) -> str:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return "model.safetensors"


def damaged_weight(model: Path) -> str:
    plant(model, "model.norm.weight", 3, float("nan"))
    return "numbers that are not finite"


@pytest.mark.few(1)
@pytest.mark.parametrize("spoil", [unknown_architecture, truncated_file, damaged_weight])
def test_a_checkpoint_that_cannot_be_served_is_one_line_and_no_port(
    spoil: Callable[[Path], str], llama: Path, tmp_path: Path
):
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    culprit = spoil(model)
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "services.cli", "decode", "--model", str(model), "--port", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    *progress, line = done.stderr.strip().splitlines()
    assert [each for each in progress if "[info" not in each] == []
    assert line.startswith("baton decode: ")
    assert culprit in line
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [["--device", "cuda"], ["--device", "auto", "--quantization", "fp8"]], ids=" ".join)
def test_what_needs_a_gpu_is_one_line_without_one(options: list[str], llama: Path):
    command = [sys.executable, "-m", "services.cli", "prefill", "--model", str(llama), *options]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("baton prefill: ")
    assert line.endswith("torch sees no CUDA GPU here")
