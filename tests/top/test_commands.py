"""`baton ls`, `baton requests` and `baton top`: what they print, and with which exit code they end."""

import asyncio
import contextlib
import json
import os
import pty
import sys

import pytest
from typer.testing import CliRunner

from services.cli import watching
from services.cli.commands import app
from services.config.option import Refusal
from tests.gateway.running_api import Api, running_api
from tests.top.fleets import DECODE, PREFILL, choice, set_workers

BATON = [sys.executable, "-m", "services.cli"]


async def run(*arguments: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a command, without a process of its own."""
    shown = await asyncio.to_thread(CliRunner().invoke, app, list(arguments))
    refused = f"{shown.exception}" if isinstance(shown.exception, Refusal) else ""
    return shown.exit_code, shown.stdout, shown.stderr + refused


def gateway(api: Api) -> str:
    return f"--gateway={choice(api).url}"


async def test_the_fleet_and_its_requests_are_printed_as_tables_and_as_json():
    async with running_api() as api:
        set_workers(api)
        answer = await api.chat()
        tables, values, workers = [
            await run("ls", gateway(api)),
            await run("ls", gateway(api), "--json"),
            await run("ls", gateway(api), "workers"),
        ]
    code, out, err = tables
    assert (code, err) == (0, "")
    first, second, third = out.strip().split("\n\n")
    assert PREFILL in first
    assert DECODE in first
    assert second.startswith("prefill")  # titles alone: nothing was handed over
    assert answer.headers["x-request-id"] in third
    told = json.loads(values[1])
    assert [worker["state"] for worker in told["workers"]] == ["ok", "ok", "gone"]
    assert [request["id"] for request in told["requests"]] == [answer.headers["x-request-id"]]
    assert told["gateway"]["id"] == "00000000000000aa"
    assert workers[1].count("\n") == 4  # a line of titles, and one for each


async def test_the_record_of_a_request_is_printed_as_text_and_as_json():
    async with running_api() as api:
        request_id = (await api.chat()).headers["x-request-id"]
        text, values, none = [
            await run("requests", gateway(api), request_id),
            await run("requests", gateway(api), request_id, "--json"),
            await run("requests", gateway(api), "no-such-id"),
        ]
    assert text[0] == 0
    assert text[1].startswith(f"request {request_id}: chat.completions m 200 length\n")
    assert json.loads(values[1])["request_id"] == request_id
    assert none == (1, "", f"{choice(api).url} knows no recent request no-such-id, or it is another key's")


async def test_a_reader_that_leaves_early_is_no_error_of_theirs():
    async with running_api() as api:
        shell = f"{' '.join(BATON)} ls {gateway(api)} | true"
        process = await asyncio.create_subprocess_exec("bash", "-c", shell, stderr=asyncio.subprocess.PIPE)
        async with asyncio.timeout(60):
            assert (await process.communicate())[1] == b""


async def test_top_runs_on_a_terminal_until_a_key_ends_it():
    async with running_api() as api:
        set_workers(api)
        ours, theirs = pty.openpty()
        os.set_blocking(ours, False)
        process = await asyncio.create_subprocess_exec(
            *BATON, "top", gateway(api), stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}
        )
        os.close(theirs)
        shown = b""
        async with asyncio.timeout(100):
            while b"127.0.0.1:9200" not in shown:
                shown += await read_some(ours)
            os.write(ours, b"q")
            while process.returncode is None:
                await read_some(ours)
        os.close(ours)
        assert process.returncode == 0


async def read_some(terminal: int) -> bytes:
    """What a program wrote to its terminal lately."""
    await asyncio.sleep(0.05)
    with contextlib.suppress(OSError):  # nothing now, or it has ended
        return os.read(terminal, 65_536)
    return b""


async def test_what_cannot_be_is_refused_in_a_line():
    nobody, unknown, terminal = [
        await run("ls", "--gateway=http://127.0.0.1:1"),
        await run("ls", "wokers"),
        await run("top"),
    ]
    assert nobody[0] == unknown[0] == terminal[0] == 1
    assert nobody[2].startswith("http://127.0.0.1:1 cannot be reached: ")
    assert unknown[2] == "'wokers' is none of workers, links, requests"
    assert terminal[2] == "`baton top` needs a terminal; `baton ls` prints tables elsewhere"


async def test_without_textual_top_says_what_to_install_and_the_others_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watching, "find_spec", lambda name: None)
    assert (await run("top"))[2].endswith("which is not installed: pip install 'baton-serve[console]'")
    modules = "services.cli.watching, services.top.listing, services.top.timeline"
    loaded = f"import sys, {modules}; assert 'textual' not in sys.modules"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", loaded)
    async with asyncio.timeout(60):
        assert await process.wait() == 0
