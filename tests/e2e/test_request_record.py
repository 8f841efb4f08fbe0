"""One time to the first token: the client's own, the record's, the header's and the histogram's."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import write_model
from tests.e2e.stack import Stack, running_stack

# Of what each measures beside the others: the client's connection, its parser, its thread.
_AGREEMENT = 0.05
_LENGTH = 800  # words of a prompt


@pytest.fixture
def slow_stack(tmp_path: Path) -> Iterator[Stack]:
    """One pair, for which a prompt is a few hundred milliseconds' work."""
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "max_position_embeddings": 4096}
    with running_stack(write_model(tmp_path, "llama", **shape)) as running:
        yield running


def ttft_of_histogram(stack: Stack) -> float:
    return stack.gateway.metric("baton_ttft_seconds_sum")


def one_stream(stack: Stack, seed: int) -> tuple[str, float, str]:
    """A stream's request id, its time to the first token as the client sees it, and its Server-Timing."""
    client = stack.gateway.client
    prompt = f"{seed} " * _LENGTH  # a text: the client takes its time over lists of numbers
    began = time.monotonic()
    with client.completions.with_streaming_response.create(
        model="tiny", prompt=prompt, max_tokens=4, temperature=0, stream=True, extra_body={"ignore_eos": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        took_s = time.monotonic() - began
        assert list(lines)
        return answer.headers["x-request-id"], took_s, answer.headers["server-timing"]


def test_all_measures_of_the_time_to_the_first_token_agree(slow_stack: Stack):
    stack = slow_stack
    one_stream(stack, 900)  # connects
    off: list[float] = []
    for seed in range(901, 911):
        before = ttft_of_histogram(stack)
        request_id, by_client, header = one_stream(stack, seed)
        by_histogram = ttft_of_histogram(stack) - before
        record: dict[str, Any] = json.loads(stack.gateway.get(f"/debug/requests/{request_id}")[1])
        by_record = record["ttft_ms"] / 1e3
        phases = dict(re.findall(r"([a-z]+);dur=([0-9.]+)", header))
        by_phases = sum(float(phases[name]) for name in phases if name not in ("handoff", "generate")) / 1e3
        assert abs(by_histogram - by_record) < 1e-5
        assert abs(by_phases - by_record) < 1e-4
        assert by_client > by_record
        off.append(by_client / by_record - 1)
        workers = {each["role"]: each for each in record["attempts"][-1]["workers"]}
        assert workers.keys() in ({"prefill", "decode"}, {"decode"})
    assert sorted(off)[len(off) // 2] < _AGREEMENT, off
