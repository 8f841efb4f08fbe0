"""`baton bench` against a real stack: its tokens are those that the gateway counted, exactly."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench.command import bench
from loadtest.bench.settings import EndpointName, Settings, WorkloadName
from tests.e2e.stack import Stack

TOKENS = ("baton_prompt_tokens_total", "baton_generated_tokens_total")
TRACE = """{"timestamp": 0, "input_length": 40, "output_length": 3, "hash_ids": [1, 2, 3]}
{"timestamp": 200, "input_length": 44, "output_length": 5, "hash_ids": [1, 2, 4]}
"""


def figures(stack: Stack, directory: Path, **settings: Any) -> dict[str, Any]:
    """The figures of a run without a warm-up, in which nothing failed; and tokens as they were counted."""
    gateway, file = stack.gateway, directory / "result.json"
    before = [gateway.metric(name) for name in TOKENS]
    asked = Settings(url=f"{gateway.url}/v1", warmup=0, json=file, **settings)
    assert bench(asked, ["baton", "bench"]) == 0
    numbers: dict[str, Any] = json.loads(file.read_text())
    counted = [int(gateway.metric(name) - was) for name, was in zip(TOKENS, before, strict=True)]
    assert [numbers["input_tokens"], numbers["output_tokens"]] == counted
    assert numbers["without_usage"] == 0
    return numbers


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("settings", "requests", "output_tokens"),
    [
        ({"requests": 6, "input": "10-40", "output": "7"}, 6, 42),
        ({"requests": 6, "rate": 40.0, "burstiness": 0.5, "input": "12", "output": "5"}, 6, 30),
        ({"requests": 5, "endpoint": EndpointName.TEXT, "concurrency": 2, "input": "12", "output": "4"}, 5, 20),
        ({"workload": WorkloadName.CONVERSATIONS, "requests": 3, "turns": 3, "input": "6", "output": "4"}, 9, 36),
        ({"workload": WorkloadName.SHARED_PREFIX, "groups": 2, "members": 2, "prefix": 32, "output": "3"}, 4, 12),
    ],
    ids=["random", "rate", "text", "conversations", "shared prefix"],
)
def test_tokens_are_those_that_the_gateway_counted(
    stack: Stack, tmp_path: Path, settings: dict[str, Any], requests: int, output_tokens: int
) -> None:
    numbers = figures(stack, tmp_path, **settings)
    assert (numbers["requests"], numbers["failed"], numbers["output_tokens"]) == (requests, 0, output_tokens)


def test_a_trace_has_its_lengths_and_what_it_shares_is_cached(stack: Stack, tmp_path: Path) -> None:
    (file := tmp_path / "trace.jsonl").write_text(TRACE)
    before = stack.gateway.metric("baton_cached_tokens_total")
    numbers = figures(stack, tmp_path, trace=file, trace_block=16, seed=77)
    assert (numbers["input_tokens"], numbers["output_tokens"]) == (84, 8)
    assert stack.gateway.metric("baton_cached_tokens_total") - before == 32  # two blocks of the first prompt


@pytest.mark.parametrize(
    ("workload", "output"), [(WorkloadName.STRUCTURED, "300"), (WorkloadName.TOOLS, "70")], ids=["structured", "tools"]
)
def test_answers_have_the_form_that_is_asked_for(
    stack: Stack, tmp_path: Path, workload: WorkloadName, output: str
) -> None:
    numbers = figures(stack, tmp_path, workload=workload, requests=3, input="5", output=output)
    assert numbers["valid"] == 1.0


def test_the_figures_of_a_baton_are_beside_those_of_the_client(stack: Stack, tmp_path: Path) -> None:
    admin = f"http://127.0.0.1:{stack.gateway.admin_port}"
    numbers = figures(stack, tmp_path, requests=4, input="30", output="3", admin_url=admin)
    assert numbers["handed_off"] is not None
    assert 0 < numbers["gateway_ttft_ms"] < numbers["ttft_ms"]["mean"]
    assert numbers["facts"]["server"].split(", ")[1].startswith("baton ")
