"""The ready lines of `baton up` say who may come in and how long a text may be, and show no key."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from services.config.engine import EngineConfig
from services.launcher.banner import ready_lines
from services.process.configs import ServingSettings, UpConfig, WorkerSettings

WORKERS = WorkerSettings(engine=EngineConfig(model=Path("m")))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "none: who reaches the port may use it"),
        ({"api_keys": ("a-secret-key",)}, "those of BATON_API_KEY"),
        ({"keys_file": Path("/etc/keys.json")}, "those of /etc/keys.json"),
    ],
)
def test_the_line_about_keys(settings: dict[str, object], said: str) -> None:
    lines = ready_lines(UpConfig(workers=WORKERS, serving=ServingSettings(served_model_name="m", **settings)))  # type: ignore[arg-type]
    assert f"keys            {said}" in lines.splitlines()
    assert ("Authorization: Bearer KEY" in lines) == bool(settings)
    assert "a-secret-key" not in lines
    assert "http://127.0.0.1:9001/metrics" in lines


def test_a_context_that_was_lowered_is_said_again() -> None:
    config = UpConfig(workers=WORKERS, serving=ServingSettings(served_model_name="m"), max_positions=8192)
    assert "context         8192 tokens" in ready_lines(config, 8192).splitlines()
    lowered = "context         512 tokens, lowered from 8192: KV has no more room; see --kv-memory"
    assert lowered in ready_lines(config, 512).splitlines()
    asked = replace(config, workers=WorkerSettings(engine=EngineConfig(model=Path("m"), max_model_len=512)))
    assert "context         512 tokens" in ready_lines(asked, 512).splitlines()
    assert "context" not in ready_lines(config)


def test_a_model_that_makes_embeddings_alone_has_an_example_of_these_and_no_handoffs() -> None:
    serving = ServingSettings(served_model_name="m")
    config = UpConfig(workers=WORKERS, serving=serving, generates=False, num_decode=0)
    lines = ready_lines(config).splitlines()
    (example,) = (line for line in lines if line.startswith("try "))
    assert "/v1/embeddings " in example
    assert json.loads(example[example.index("{") : -1]) == {"model": "m", "input": ["What is the capital of France?"]}
    assert "workers         1 prefill, 0 decode" in lines
    assert "handoff         none: the model makes embeddings, and generates nothing" in lines


@pytest.mark.parametrize(
    ("chats", "path", "field"), [(True, "chat/completions", "messages"), (False, "completions", "prompt")]
)
def test_the_example_is_a_request_that_the_model_can_answer(chats: bool, path: str, field: str) -> None:
    config = UpConfig(workers=WORKERS, serving=ServingSettings(served_model_name="m"), chats=chats)
    (line,) = (line for line in ready_lines(config).splitlines() if line.startswith("try "))
    assert f" http://127.0.0.1:8000/v1/{path} " in line
    assert field in json.loads(line[line.index("{") : -1])
