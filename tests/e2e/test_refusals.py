"""What cannot be served is refused in one line, before any port opens."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import edit_json
from tests.e2e.stack import free_ports

pytestmark = pytest.mark.xdist_group("e2e")  # one test process, so that each stack is started once


def unknown_architecture(model: Path) -> str:
    edit_json(model / "config.json", architectures=["GptNeoForCausalLM"])
    return "GptNeoForCausalLM"


def truncated_file(model: Path) -> str:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return "model.safetensors"


@pytest.mark.parametrize("spoil", [unknown_architecture, truncated_file])
def test_a_checkpoint_that_cannot_be_served_is_one_line_and_no_port(
    spoil: Callable[[Path], str], llama: Path, tmp_path: Path
):
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    culprit = spoil(model)
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "services.cli", "decode", "--model", str(model), "--port", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("baton decode: ")
    assert culprit in line
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))
