"""The console's feed of a whole stack: a handoff is seen to happen, figures are those of records and metrics, and a
worker that is killed is seen to go and to come back.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from tests.e2e.conftest import prompt_of
from tests.e2e.stack import Stack
from tests.e2e.test_pair import GREEDY

Fits = Callable[[Any], bool]


class Console:
    """A console that listens. rows: by number, as they are now."""

    def __init__(self, response: httpx2.Response) -> None:
        self._lines = response.iter_lines()
        self.rows: dict[int, Any] = {}
        self.events: list[Any] = []

    def next(self, name: str, fits: Fits = lambda data: True) -> Any:
        """The data of the next event of this name that fits. A stream that is silent for 60 s fails."""
        while True:
            found = next(self._lines).removeprefix("event: ")
            data = json.loads(next(self._lines).removeprefix("data: "))
            next(self._lines)
            for row in data.get("rows", []) or data.get("requests", []) if found in ("hello", "requests") else ():
                self.rows[row["n"]] = row
            if found == "event":
                self.events.append(data)
            if found == name and fits(data):
                return data

    def ended(self, request_id: str) -> Any:
        """The row of a request that has ended."""
        while not (rows := [row for row in self.rows.values() if row["id"] == request_id and row["ms"] is not None]):
            self.next("requests")
        return rows[0]


@contextmanager
def console(stack: Stack) -> Iterator[Console]:
    url = f"http://127.0.0.1:{stack.gateway.admin_port}/console/feed"
    with httpx2.Client(timeout=60) as client, client.stream("GET", url) as response:
        assert response.status_code == 200
        yield Console(response)


def link_of(tick: Any) -> Any:
    return next(iter(tick["links"]), {"handoffs": 0, "bytes": 0})


def worker_of(tick: Any, role: str) -> Any:
    (worker,) = (each for each in tick["workers"] if each["role"] == role)
    return worker


def test_a_handoff_is_seen_and_figures_are_those_of_record_and_metrics(stack: Stack):
    generated = stack.gateway.metric("baton_generated_tokens_total")
    with console(stack) as listener:
        before = link_of(listener.next("tick"))
        completions = stack.gateway.client.completions.with_raw_response
        answer = completions.create(prompt=prompt_of(971, 100), max_tokens=7, **GREEDY)
        request_id, usage = answer.headers["x-request-id"], answer.parse().usage
        row = listener.ended(request_id)
        tick = listener.next("tick", lambda tick: link_of(tick)["handoffs"] > before["handoffs"])
    assert usage is not None
    record = json.loads(stack.gateway.get(f"/debug/requests/{request_id}")[1])
    assert (row["prompt"], row["generated"], row["state"]) == (usage.prompt_tokens, usage.completion_tokens, "done")
    names = {"ttft_ms": "ttft_ms", "ms": "duration_ms", "attempts": "num_attempts", "workers": "workers", "n": "number"}
    assert {name: row[name] for name in names} == {name: record[other] for name, other in names.items()}
    assert stack.gateway.metric("baton_generated_tokens_total") - generated == usage.completion_tokens
    link = link_of(tick)
    assert (link["prefill"], link["decode"]) == (row["workers"]["prefill"], row["workers"]["decode"])
    assert link["bytes"] > before["bytes"]
    assert link["bytes"] == stack.gateway.metric("baton_pair_kv_bytes_total")
    assert {worker["state"] for worker in tick["workers"]} == {"ok"}
    assert tick["unhealthy"] == []
    assert worker_of(tick, "decode")["kv"]["device"]["total"] == worker_of(tick, "decode")["num_blocks"]


@pytest.mark.long
def test_a_worker_that_is_killed_is_gone_at_once_and_comes_back(stack: Stack):
    with console(stack) as listener:
        worker = worker_of(listener.next("tick"), "decode")
        try:
            stack.workers["decode-0"].kill()
            tick = listener.next("tick", lambda tick: worker_of(tick, "decode")["state"] != "ok")
            gone = worker_of(tick, "decode")
            assert (gone["state"], gone["kv"], gone["restarted"]) == ("gone", None, worker["restarted"])
            assert gone["why"]
            assert [(each["what"], each["name"]) for each in tick["unhealthy"]] == [
                ("gateway", tick["gateway"]["id"]),
                ("worker", worker["address"]),
            ]
        finally:
            stack.heal()
        tick = listener.next("tick", lambda tick: worker_of(tick, "decode")["state"] == "ok")
        back = worker_of(tick, "decode")
        assert (back["restarted"], back["why"]) == (worker["restarted"] + 1, None)
        assert back["incarnation"] != worker["incarnation"]
        assert tick["unhealthy"] == []
    assert [(each["kind"], each["name"]) for each in listener.events[:2]] == [
        ("worker_gone", worker["address"]),
        ("worker_up", worker["address"]),
    ]
