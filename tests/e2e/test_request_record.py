"""One time to the first token: the client's own, the record's, the header's and the histogram's.

How much longer it is for the client than at the gateway is a figure of `python -m loadtest client`.
"""

import json
import re
import time
from dataclasses import dataclass
from typing import Any

from tests.e2e.stack import Stack

# Clocks are compared that both processes read, but the record's moments are told apart by another clock of the machine
# than its beginning, and rounded.
_ROUNDING_S = 1e-3


@dataclass(frozen=True)
class Streamed:
    """A stream as the client saw it; moments are `time.time`'s."""

    request_id: str
    server_timing: str
    sent: float
    first_chunk: float


def one_stream(stack: Stack, seed: int) -> Streamed:
    client = stack.gateway.client
    sent = time.time()
    with client.completions.with_streaming_response.create(
        model="tiny",
        prompt=f"{seed} " * 100,
        max_tokens=4,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        first_chunk = time.time()
        assert list(lines)
        return Streamed(answer.headers["x-request-id"], answer.headers["server-timing"], sent, first_chunk)


def test_all_measures_of_the_time_to_the_first_token_agree(stack: Stack):
    """The gateway's own are one number. The client's interval holds the gateway's within it."""
    for seed in range(901, 904):
        before = stack.gateway.metric("baton_ttft_seconds_sum")
        streamed = one_stream(stack, seed)
        by_histogram = stack.gateway.metric("baton_ttft_seconds_sum") - before
        record: dict[str, Any] = json.loads(stack.gateway.get(f"/debug/requests/{streamed.request_id}")[1])
        by_record = record["ttft_ms"] / 1e3
        phases = dict(re.findall(r"([a-z]+);dur=([0-9.]+)", streamed.server_timing))
        by_phases = sum(float(phases[name]) for name in phases if name not in ("handoff", "generate")) / 1e3
        assert abs(by_histogram - by_record) < 1e-5
        assert abs(by_phases - by_record) < 1e-4
        assert streamed.sent - _ROUNDING_S < record["arrived_at"]
        assert record["arrived_at"] + by_record < streamed.first_chunk + _ROUNDING_S
        workers = {each["role"]: each for each in record["attempts"][-1]["workers"]}
        assert workers.keys() in ({"prefill", "decode"}, {"decode"})
