"""Models by their id on the hub: what is fetched, and what is said where it cannot be."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from loadtest.processes import free_ports
from services.cli import hub
from tests.cli.hub_server import TOKEN, Hub, Repository, serving
from tests.e2e.stack import wait_until
from tests.gateway import tokenizer_files

ROOT = Path(__file__).parents[2]
FETCH = """
import json, sys
from services.cli import hub
answers = []
for id, revision, weights in json.loads(sys.argv[1]):
    try:
        answers.append(str(hub.fetch(id, revision, weights=weights)))
    except hub.HubError as error:
        answers.append(f"HubError: {error}")
print(json.dumps(answers))
"""
TEXTS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def write_repository(directory: Path, *files: str) -> Path:
    """A model that a gateway can serve, and further files."""
    tokenizer = tokenizer_files.byte_level()
    directory.mkdir()
    tokenizer_files.write(directory, tokenizer)
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text("{}")
    for name in files:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(name.encode() * 100)
    return directory


@pytest.fixture(scope="module")
def local_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    directory = tmp_path_factory.mktemp("hub")
    shards = ["model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"]
    elsewhere = ["consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin", "README.md"]
    whole = write_repository(directory / "whole", *shards, *elsewhere, "chat_template.jinja")
    pickled = write_repository(directory / "pickled", "pytorch_model.bin")
    repositories = {
        "org/whole": Repository(whole),
        "org/pickled": Repository(pickled),
        "org/gated": Repository(whole, gated=True),
    }
    with serving(repositories) as running:
        yield running


def environment(home: Path, endpoint: str, **further: str) -> dict[str, str]:
    """Of a process that knows only this hub and this cache."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**inherited, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, **further}


def fetch(env: dict[str, str], *calls: tuple[str, str | None, bool]) -> list[str]:
    """Directories, or what was said instead, of calls in a process of their own: it reads its settings once."""
    command = [sys.executable, "-c", FETCH, json.dumps(calls)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answers: list[str] = json.loads(done.stdout)
    assert not any("\n" in answer for answer in answers)
    return answers


def test_a_model_is_fetched_once_and_only_what_is_read(local_hub: Hub, tmp_path: Path) -> None:
    online = environment(tmp_path, local_hub.url)
    local_hub.taken.clear()
    (texts,) = fetch(online, ("org/whole", None, False))
    assert {path.name for path in Path(texts).iterdir()} == TEXTS == set(local_hub.taken)
    local_hub.taken.clear()
    whole, again = fetch(online, ("org/whole", "main", True), ("org/whole", None, True))
    weights = {"model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"}
    assert whole == again == texts
    assert {path.name for path in Path(whole).iterdir()} == TEXTS | weights
    assert sorted(local_hub.taken) == sorted(weights)
    assert (Path(whole) / "model-1.safetensors").read_bytes() == b"model-1.safetensors" * 100
    for unreachable in (
        environment(tmp_path, local_hub.url, HF_HUB_OFFLINE="1"),
        environment(tmp_path, f"http://127.0.0.1:{free_ports(1)[0]}"),
    ):
        cached, missing = fetch(unreachable, ("org/whole", None, True), ("org/gated", None, True))
        assert cached == whole
        assert missing.startswith("HubError: org/gated is not whole in the cache, and the hub cannot be reached: run ")


def test_what_cannot_be_had_is_said_in_one_line(local_hub: Hub, tmp_path: Path) -> None:
    missing, impossible, gated, revision, pickled = fetch(
        environment(tmp_path, local_hub.url),
        ("org/none", None, True),
        ("org/a--b", None, True),
        ("org/gated", None, True),
        ("org/whole", "v9", True),
        ("org/pickled", None, True),
    )
    assert missing.startswith("HubError: org/none is no directory here, and no model on the hub; or ")
    assert "HF_TOKEN" in missing
    assert impossible.startswith("HubError: org/a--b could not be fetched from the hub: ")
    assert gated.startswith("HubError: org/gated is open only to those who asked: ")
    assert revision == "HubError: org/whole has no revision v9 on the hub"
    assert pickled.startswith(
        "HubError: org/pickled has no *.safetensors. If it has a .gguf file, download that and name it"
    )
    assert "from_pretrained('org/pickled').save_pretrained('DIR')" in pickled


def test_a_token_opens_a_gated_model(local_hub: Hub, tmp_path: Path) -> None:
    (found,) = fetch(environment(tmp_path, local_hub.url, HF_TOKEN=TOKEN), ("org/gated", None, False))
    assert (Path(found) / "config.json").is_file()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", True),
        ("Qwen/Qwen2.5-0.5B", True),
        ("name", False),
        ("/models/name", False),
        ("./name", False),
        ("../name", False),
        ("a/b/c", False),
        ("~/name", False),
    ],
)
def test_what_may_be_an_id(text: str, expected: bool) -> None:
    assert hub.is_id(text) == expected


@pytest.mark.long
def test_the_command_line_takes_an_id(local_hub: Hub, tmp_path: Path) -> None:
    """A gateway serves it under its id, and fetches no weights; what goes wrong is one line more."""
    env = environment(tmp_path, local_hub.url)
    command = [sys.executable, "-m", "services.cli"]
    refused = subprocess.run(
        [*command, "prefill", "--model", "org/none"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert refused.returncode == 1
    assert [line.split(" ")[1] for line in refused.stderr.splitlines()] == ["org/none:", "org/none"]
    local_hub.taken.clear()
    port, grpc_port, admin_port, nobody = free_ports(4)
    options = ["--port", str(port), "--grpc-port", str(grpc_port), "--admin-port", str(admin_port)]
    options += ["--workers", f"127.0.0.1:{nobody}"]
    with subprocess.Popen([*command, "gateway", "--model", "org/whole", *options], cwd=ROOT, env=env) as gateway:
        wait_until(lambda: accepts(port), what="the gateway")
        models = httpx2.get(f"http://127.0.0.1:{port}/v1/models", timeout=60).json()
        gateway.terminate()
    assert [model["id"] for model in models["data"]] == ["org/whole"]
    assert set(local_hub.taken) == TEXTS


def accepts(port: int) -> bool:
    """True when somebody listens there."""
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0
