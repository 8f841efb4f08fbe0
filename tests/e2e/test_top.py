"""`baton ls`, `baton requests` and `baton top` before real workers."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Label, Static

from services.cli.watching import FleetCommands
from services.top.config import GatewayChoice
from services.top.feed import GatewayClient
from services.top.screen.app import Top
from services.top.screen.questions import ScaleQuestion
from services.top.timeline import phases_of
from tests.e2e.stack import Stack
from tests.e2e.up import Up, running_up
from tests.top.fleets import until
from tests.top.test_screen import WIDE, press, rows_of, text_of


def ask(command: str, admin_port: int, *arguments: str) -> str:
    """What a command prints."""
    line = [sys.executable, "-m", "services.cli", command, f"--gateway=http://127.0.0.1:{admin_port}", *arguments]
    return subprocess.run(line, check=True, capture_output=True, text=True, timeout=120).stdout


def complete(client: Any, prompt: str) -> str:
    """Sends a request that is handed over; returns its id."""
    answer = client.completions.with_raw_response.create(
        model="tiny", prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    answer.parse()
    return str(answer.headers["x-request-id"])


@pytest.mark.long
def test_a_handoff_is_seen_and_the_phases_of_its_request_add_up_to_its_time(stack: Stack):
    request_id = complete(stack.gateway.client, "1201 " * 100)
    told = json.loads(ask("ls", stack.gateway.admin_port, "--json"))
    assert sorted(worker["role"] for worker in told["workers"]) == ["decode", "prefill"]
    assert {worker["state"] for worker in told["workers"]} == {"ok"}
    (link,) = told["links"]
    assert link["handoffs"] >= 1
    assert link["bytes"] > 0
    (row,) = (row for row in told["requests"] if row["id"] == request_id)
    assert row["workers"].keys() == {"prefill", "decode"}
    record = json.loads(ask("requests", stack.gateway.admin_port, request_id, "--json"))
    following = [length for name, _, length in phases_of(record) if name != "handoff"]
    assert sum(following) == pytest.approx(record["duration_ms"], abs=0.1)
    text = ask("requests", stack.gateway.admin_port, request_id)
    assert re.search(r"KV over (nixl|grpc)", text)
    assert " chosen " in text


async def test_a_terminal_shows_workers_their_link_and_the_request(stack: Stack):
    request_id = complete(stack.gateway.client, "1202 " * 100)
    async with GatewayClient(GatewayChoice(url=f"http://127.0.0.1:{stack.gateway.admin_port}")) as client:
        app = Top(client, FleetCommands(None))
        async with app.run_test(size=WIDE) as pilot:
            await until(lambda: sorted(row[1] for row in rows_of(app, "workers")) == ["decode", "prefill"])
            await press(pilot, "2")
            assert len(rows_of(app, "links")) == 1
            await press(pilot, "3")
            assert rows_of(app, "requests")[0][1] == request_id
            await press(pilot, "enter")
            await until(lambda: "attempt 1" in str(app.screen.query_one("#record", Static).content))


@pytest.mark.long
async def test_keys_drain_restart_and_scale_a_running_up(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """tests/top/test_screen.py has the keys before a launcher's socket alone, in a short time."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with running_up(llama, tmp_path) as up:
        async with GatewayClient(GatewayChoice(url=f"http://127.0.0.1:{up.admin_port}")) as client:
            await _change(up, client)


async def _change(up: Up, client: GatewayClient) -> None:
    app = Top(client, FleetCommands(None))
    async with app.run_test(size=WIDE) as pilot:
        await until(lambda: serving(app) == ["decode", "prefill"], 60)
        await press(pilot, "c")
        await until(lambda: isinstance(app.screen, ScaleQuestion), 60)
        here = str(app.screen.query_one("#here", Label).content)
        assert here == "`baton up` has 1 prefill (prefill-0); 1 decode (decode-0)."
        await press(pilot, "tab", "2", "enter")
        await until(lambda: text_of(app, "said").startswith("scale: 1 prefill"), 300)
        await until(lambda: serving(app) == ["decode", "decode", "prefill"], 60)
        first = next(row[0] for row in rows_of(app, "workers") if row[1] == "decode")
        to_the_top = ["up"] * 3  # the cursor has stayed with the worker at which it was, wherever that is by now
        await press(pilot, *to_the_top, *["down"] * [row[0] for row in rows_of(app, "workers")].index(first), "d", "y")
        await until(lambda: text_of(app, "said") == f"drain {first}: {first} is drained and ends", 120)
        await until(lambda: serving(app) == ["decode", "decode", "prefill"], 300)  # `baton up` starts it again
        gateway = gateway_pid(app)
        await press(pilot, "R", "y")
        await until(lambda: app._command.name is None and gateway_pid(app) != gateway, 500)
        await until(lambda: serving(app) == ["decode", "decode", "prefill"], 60)
    assert up.process.poll() is None


def gateway_pid(app: Top) -> int | None:
    tick = app._view.tick
    return tick.gateway.pid if tick and tick.gateway else None


def serving(app: Top) -> list[str]:
    """The roles of the workers that serve."""
    return sorted(row[1] for row in rows_of(app, "workers") if row[2] == "ok")
