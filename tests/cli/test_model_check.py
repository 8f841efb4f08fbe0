"""`baton up` refuses a model that cannot be served in one line, before it starts a process or imports torch."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from services.cli.commands import app
from services.config import LoadFormat
from services.config.engine import EngineConfig
from services.config.option import Refusal
from services.engine.runner.model_check import check_model
from services.launcher import main as launcher
from services.launcher import random_model
from tests.gguf_files import write_gguf

ROOT = Path(__file__).parents[2]


def configure(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])


def odd_header(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", None]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "architecture": (lambda model: configure(model, architectures=["PhiForCausalLM"]), "'PhiForCausalLM'"),
    "setting": (lambda model: configure(model, num_experts=8), "num_experts"),
    "quantization": (lambda model: configure(model, quantization_config={"quant_method": "hqq"}), "'hqq'"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "has no weights"),
    "half a download": (lambda model: truncate(model / "model.safetensors"), "is truncated or not a safetensors file"),
    "odd header": (lambda model: odd_header(model / "model.safetensors"), "is truncated or not a safetensors file"),
    "no tokenizer": (lambda model: (model / "tokenizer.json").unlink(), "tokenizer.json"),
    "too large": (lambda model: configure(model, intermediate_size=10**9), " GiB of memory are free"),
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def run(config: object) -> int:
        raise AssertionError("it is started")

    monkeypatch.setattr(launcher, "run", run)
    return shutil.copytree(random_model.made(), tmp_path / "model")


def refusal(*arguments: str) -> str:
    with pytest.raises(Refusal) as refused:
        typer.main.get_command(app).main(["up", *arguments], prog_name="baton", standalone_mode=False)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_model_that_cannot_be_served_is_refused_before_anything_starts(damage: str, model: Path) -> None:
    change, words = DAMAGES[damage]
    change(model)
    assert words in refusal(f"--model={model}")


def test_options_that_the_model_or_the_machine_has_no_room_for_are_refused(model: Path) -> None:
    said = refusal(f"--model={model}", "--max-model-len=9000")
    assert said == "max_model_len 9000 is more than the model's 8192 positions"
    said = refusal(f"--model={model}", "--kv-memory=1000000GiB", "--share-weights=off")
    assert "need 0.02 GiB and --kv-memory 1000000.00 GiB for each of 2 workers" in said
    assert said.endswith(" GiB of memory are free")
    said = refusal(f"--model={model}", "--kv-memory=1000000GiB", "--share-weights=on")
    assert "need 0.02 GiB, which 2 workers share, and --kv-memory 1000000.00 GiB for each of 2 workers" in said


def test_random_weights_need_no_files_with_weights(model: Path) -> None:
    configure(model, dtype=None)
    (model / "model.safetensors").unlink()
    facts = check_model(EngineConfig(model=model, load_format=LoadFormat.DUMMY), 1)
    assert facts.max_positions == 8192


def test_a_gguf_file_that_cannot_be_served_is_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", model, change={"general.architecture": "phi3"})
    assert "phi3" in refusal(f"--model={file}")
    file = write_gguf(tmp_path / "n.gguf", model, change={"tokenizer.ggml.model": "bert"})
    assert "bert" in refusal(f"--model={file}")
    whole = write_gguf(tmp_path / "o.gguf", model)
    truncate(whole)
    assert "it ends before tensor" in refusal(f"--model={whole}")


def test_the_check_of_a_model_needs_no_torch() -> None:
    code = (
        "import sys; from services.engine.runner.model_check import check_model\n"
        "from services.config.engine import EngineConfig\n"
        "from services.launcher import random_model; print(check_model(EngineConfig(model=random_model.made()), 2))\n"
        "sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "ModelFacts(max_positions=8192, has_chat_template=True, generates=True)\n"
