"""`baton models check`: what a model takes and what of it is refused, from its files alone."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from services.cli.commands import app
from services.config.option import Refusal
from services.engine.models.architectures import SHAPES, parse_model_config
from services.engine.models.described_parts import described_parts
from services.launcher import main as launcher
from services.launcher import random_model
from services.process.configs import UpConfig
from tests.checkpoints import edit_json, write_checkpoint
from tests.engine.models.published_configs import PUBLISHED
from tests.gguf_files import write_gguf

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(random_model.made(), tmp_path / "model"))


def check(model: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", "check", str(model), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def checked(model: Path, *options: str) -> tuple[int, dict[str, Any]]:
    code, text = check(model, "--json", *options)
    return code, json.loads(text)


def test_what_a_model_takes_is_said_by_its_shapes_and_by_the_layout_of_its_kv(model: Path):
    code, said = checked(model)
    assert code == 0
    assert (said["model"], said["architecture"], said["dtype"]) == ("model", "LlamaForCausalLM", "float32")
    stored = (model / "model.safetensors").stat().st_size
    assert stored - 10_000 < said["weight_bytes"] == 4 * said["parameters"] < stored
    assert said["kv_bytes_per_1000_tokens"] == 1000 * 4 * 2 * 4 * 32 * 4  # layers, K and V, heads, head_dim, float32
    assert (said["max_positions"], said["refused"]) == (8192, [])
    assert said["parts"]["attention"] == "4 layers, 8 heads of 32 over 4 of K and V"
    _, halved = checked(model, "--dtype=bfloat16")
    assert (halved["weight_bytes"], halved["kv_bytes_per_1000_tokens"]) == (
        said["weight_bytes"] // 2,
        said["kv_bytes_per_1000_tokens"] // 2,
    )
    assert checked(model, "--dtype=float16")[1]["kernels"] == "torch's operations (there are none for float16)"


def test_the_table_has_what_the_json_has(model: Path):
    code, text = check(model)
    assert code == 0
    rows = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in text.splitlines())
    _, said = checked(model)
    assert rows["parameters"] == f"{said['parameters']:,}"
    assert rows["KV"] == "3.91 MiB for 1,000 tokens"
    assert rows["kernels"] == said["kernels"]
    assert {name: rows[name] for name in said["parts"]} == said["parts"]
    assert rows["refused"] == "nothing"


def test_everything_that_is_refused_is_named_at_once(model: Path):
    edit_json(model / "config.json", num_experts=8, foo={"a": 1})
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).unlink()
    code, said = checked(model)
    assert code == 1
    culprits = ["num_experts", "foo", "tokenizer.json", "has no weights"]
    assert [culprit in reason for culprit, reason in zip(culprits, said["refused"], strict=True)] == [True] * 4
    assert said["parameters"] == 5_048_576
    code, text = check(model)
    assert (code, text.count("\nrefused ")) == (1, 4)


def test_an_architecture_that_is_not_there_is_named_and_has_no_numbers(model: Path):
    edit_json(model / "config.json", architectures=["\x1b[2JForCausalLM"])
    code, said = checked(model)
    assert (code, said["parameters"], said["parts"]) == (1, None, {})
    assert "is not supported" in said["refused"][0]
    assert "\x1b" not in check(model)[1]


def test_a_model_without_a_chat_template_is_served_and_said_to_have_none(model: Path):
    edit_json(model / "tokenizer_config.json", drop=("chat_template",))
    code, said = checked(model)
    assert (code, said["refused"]) == (0, [])
    assert said["notes"] == ["there is no chat template: chats need --chat-template"]


def test_a_gguf_file_is_checked_too(model: Path, tmp_path: Path):
    file = write_gguf(tmp_path / "m.gguf", model)
    code, said = checked(file)
    assert (code, said["model"], said["parameters"]) == (0, "m", 5_048_576)
    assert said["parts"]["stored as"] == "30 matrices F32"


def test_how_weights_are_stored_is_said(model: Path):
    assert "stored as" not in checked(model)[1]["parts"]
    edit_json(model / "config.json", quantization_config={"quant_method": "awq", "bits": 4, "group_size": 64})
    assert checked(model)[1]["parts"]["stored as"] == "AWQ, 4 bits, groups of 64, with zero points"
    edit_json(model / "config.json", quantization_config={"quant_method": "awq", "bits": 3})
    code, said = checked(model)
    assert (code, said["refused"]) == (1, ["config.json: quantization_config: bits 3 is not supported (only 4)"])


def test_a_model_that_is_not_there_is_a_refusal_in_a_line():
    with pytest.raises(Refusal, match="no such directory"):
        typer.main.get_command(app).main(["models", "check", "nowhere"], prog_name="baton", standalone_mode=False)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_model_has_words_for_its_parts_and_numbers(name: str, model: Path):
    """The same numbers of parameters that its shapes have are in test_model_config."""
    (model / "config.json").write_text(json.dumps(PUBLISHED[name]))
    _, said = checked(model)
    assert said["architecture"] in SHAPES
    assert all(said["parts"].values())
    assert said["parameters"] > 0
    assert [reason for reason in said["refused"] if "config.json" in reason] == []


@pytest.mark.parametrize(
    ("family", "shape", "window", "layers_behind", "words"),
    [
        (
            "gemma3",
            {"num_hidden_layers": 7, "sliding_window": 48},
            48,
            1,
            "0.24 MiB for those behind the window of 48",
        ),
        ("gemma3", {"num_hidden_layers": 7, "sliding_window": 512}, None, None, ""),
        ("mistral", {"num_hidden_layers": 7, "sliding_window": 48}, 48, 0, "nothing for those behind the window of 48"),
        ("mistral", {"num_hidden_layers": 7, "sliding_window": None}, None, None, ""),
    ],
)
def test_kv_that_is_kept_behind_windows(
    family: str, shape: dict[str, Any], window: int | None, layers_behind: int | None, words: str, tmp_path: Path
):
    """Of seven layers, all or those that have no window; a window of all 512 positions hides nothing."""
    write_checkpoint(tmp_path, family, **shape)
    _, said = checked(tmp_path)
    layer_bytes = 1000 * 2 * 2 * 16 * 4  # K and V, heads, head_dim, float32
    assert said["kv_bytes_per_1000_tokens"] == 7 * layer_bytes
    assert said["kv_window"] == window
    behind = None if layers_behind is None else layers_behind * layer_bytes
    assert said["kv_bytes_per_1000_tokens_behind_window"] == behind
    _, text = check(tmp_path)
    (kv,) = (line for line in text.splitlines() if line.startswith("KV"))
    assert kv.partition(" tokens")[2].removeprefix(", ") == words


def test_up_says_in_one_line_what_the_model_takes(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(launcher, "run", lambda config: 0)
    typer.main.get_command(app).main(["up", f"--model={model}"], prog_name="baton", standalone_mode=False)
    kernels = checked(model)[1]["kernels"]
    words = "5.05 million parameters: 19.26 MiB of weights in float32, 3.91 MiB of KV for 1,000 tokens"
    assert capsys.readouterr().err == f"baton: LlamaForCausalLM, {words}, kernels: {kernels}\n"


def test_an_encoder_keeps_no_kv_and_up_starts_prefill_workers_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bert = write_checkpoint(tmp_path / "bert", "bert")
    shutil.copy(model / "tokenizer.json", bert)
    code, said = checked(bert)
    assert (code, said["kv_bytes_per_1000_tokens"], said["notes"]) == (0, 0, [])
    assert said["parts"]["attention"] == "2 layers, 4 heads of 16, both ways"
    started: list[UpConfig] = []

    def run(config: UpConfig) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr(launcher, "run", run)
    up = typer.main.get_command(app)
    up.main(["up", f"--model={bert}", "--decode=3"], prog_name="baton", standalone_mode=False)
    assert [(config.num_prefill, config.num_decode, config.generates) for config in started] == [(1, 0, False)]
    for option, words in (("--prefill=0", "--prefill 0"), ("--kv-memory=1GiB", "--kv-memory is for")):
        with pytest.raises(Refusal, match=words):
            up.main(["up", f"--model={bert}", option], prog_name="baton", standalone_mode=False)


def test_the_check_of_a_model_needs_no_torch(model: Path):
    code = (
        "import sys; from services.engine.runner.model_report import report_model, summary\n"
        "from services.config.engine import EngineConfig; from pathlib import Path\n"
        f"engine = EngineConfig(model=Path({str(model)!r})); report_model(engine); summary(engine)\n"
        "sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("Gemma 2", "attention", "4096 tokens in 13 of them, scores capped at 50"),
        ("gpt-oss, in bfloat16", "attention", "sinks"),
        ("Mixtral", "MLP", "2 of 8 experts of 14336, gated by SiLU"),
        ("DeepSeek V2 Lite", "MLP", "in 26 layers 6 of 64 experts of 1408, one of 2816 for all tokens"),
        ("DeepSeek V2 Lite", "attention", "16 heads of 192 over latents of 576"),
    ],
)
def test_the_parts_of_a_family_are_named(name: str, part: str, words: str):
    assert words in described_parts(parse_model_config(PUBLISHED[name]))[part]
