"""`baton bench` as a process: its options, its figures, Ctrl-C, its terminal."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from loadtest.bench import access
from loadtest.bench.command import command_words
from loadtest.bench.plan import make_plan
from loadtest.bench.runner import Runner, Target
from loadtest.bench.search import Search
from loadtest.bench.settings import Settings
from services.cli.commands import app
from services.config.option import Refusal
from tests.loadtest.bench_server import BenchServer, serving

SMALL = ("--requests", "5", "--input", "7", "--output", "3")


@pytest.fixture
def server() -> Iterator[BenchServer]:
    with serving(BenchServer()) as running:
        yield running


def baton(*arguments: str) -> int:
    """Runs it in this process, and returns its exit code. Raises Refusal."""
    code: int = typer.main.get_command(app).main(["bench", *arguments], prog_name="baton", standalone_mode=False)
    return code


def bench(server: BenchServer, *arguments: str) -> int:
    return baton("--url", server.url, *arguments)


def result_of(server: BenchServer, file: Path, *arguments: str) -> dict[str, Any]:
    assert bench(server, *arguments, "--json", str(file)) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def started(server: BenchServer, *arguments: str, **more: Any) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "services.cli", "bench", "--url", server.url, *arguments]
    return subprocess.Popen(command, **more)


def test_every_setting_is_an_option_with_a_help_text() -> None:
    options = {parameter.name: parameter for parameter in typer.main.get_command(app).commands["bench"].params}  # type: ignore[attr-defined]
    assert set(options) == {field.name for field in fields(Settings)}
    assert all(option.help for option in options.values())


def test_it_says_how_fast_a_server_answers(
    server: BenchServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.first_s, server.gap_s = 0.1, 0.02
    numbers = result_of(server, tmp_path / "r.json", *SMALL, "--slo", "ttft=60s,itl=60s", "--label", "mine")
    assert (numbers["requests"], numbers["failed"], numbers["output_tokens"]) == (5, 0, 15)
    assert numbers["input_tokens"] == 55
    assert numbers["ttft_ms"]["p50"] >= 100
    assert 20 <= numbers["itl_ms"]["p50"] <= numbers["ttft_ms"]["p50"]
    assert numbers["e2e_ms"]["mean"] >= 140
    assert numbers["goodput"]["share"] == 1
    assert numbers["client"]["cpu_s"] > 0
    assert numbers["label"] == "mine"
    assert numbers["facts"]["server"].endswith("somebody 1.2.3")
    assert len(server.bodies) == 9  # with the warm-up
    out, err = capfd.readouterr()
    assert "requests        5 (0 failed)" in out
    assert "100.0% of them all (ttft 60000 ms, itl 60000 ms; missed: ttft by 0, itl by 0)" in out
    assert err == ""  # no progress where nobody looks


def test_the_url_may_be_that_of_openais_clients(server: BenchServer) -> None:
    assert baton("--url", f"{server.url}/v1", *SMALL, "--api-key", "a,b") == 0
    assert set(server.paths) == {"/v1/completions"}
    assert set(server.keys) == {"Bearer a"}


def test_the_key_of_the_environment_goes_to_the_server_alone(
    server: BenchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for in the environment by other commands too: another machine gets it over TLS."""
    monkeypatch.setenv("BATON_API_KEY", "a-key,another")
    assert bench(server, *SMALL, "--admin-url", server.url) == 0
    assert set(server.keys) == {"Bearer a-key"}
    assert set(server.metrics_keys) == {None}
    for url in ("http://192.0.2.1:8000", "http://example.org/v1"):
        with pytest.raises(Refusal, match=f"{url}: a key .* is not sent as plain text"):
            baton("--url", url)
    assert access.address("https://192.0.2.1", None, None).api_key == "a-key"
    assert access.address("http://[::1]", None, None).api_key == "a-key"
    assert access.admin_address("http://192.0.2.1:9001", None).api_key is None


def test_texts_and_chats_are_asked_for(server: BenchServer) -> None:
    assert bench(server, *SMALL, "--endpoint", "text", "--warmup", "0") == 0
    assert bench(server, *SMALL, "--endpoint", "chat", "--warmup", "0", "--stop-at-eos") == 0
    texts, chats = server.bodies[:5], server.bodies[5:]
    assert {len(body["prompt"].split()) for body in texts} == {7}
    assert {len(body["messages"][0]["content"].split()) for body in chats} == {7}
    assert {body.get("ignore_eos") for body in texts} == {True}
    assert {body.get("ignore_eos") for body in chats} == {None}


def test_failures_are_counted_by_kind_and_leave_exit_code_1(
    server: BenchServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuses = {0: 429, 2: 503, 3: 503}
    assert bench(server, *SMALL, "--warmup", "0") == 1
    out = capsys.readouterr().out
    assert "requests        5 (3 failed)" in out
    assert "errors          2 × status 503, 1 × status 429" in out


def test_the_counters_of_a_baton_are_those_of_the_run(server: BenchServer, tmp_path: Path) -> None:
    numbers = result_of(server, tmp_path / "r.json", *SMALL, "--admin-url", server.url)
    assert (numbers["handed_off"], numbers["kv_bytes_moved"]) == (1.0, 5000)
    with pytest.raises(Refusal, match="no counters of a Baton are there"):
        bench(server, *SMALL, "--admin-url", "http://127.0.0.1:1")
    for other in (b"<!doctype html><p>hello</p>", b'{"a": 1}', b"\xff\xfe", b"baton_handoffs_total inf"):
        server.other_metrics = other
        with pytest.raises(Refusal, match="no counters of a Baton are there"):
            bench(server, *SMALL, "--admin-url", server.url)


@pytest.mark.long
def test_counters_that_are_gone_after_a_run_are_missed(
    server: BenchServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.metrics_end = 5  # requests
    numbers = result_of(server, tmp_path / "r.json", *SMALL, "--warmup", "0", "--admin-url", server.url)
    assert (numbers["handed_off"], numbers["counters_lost"]) == (None, True)
    assert "the admin port told no counters after the run" in capfd.readouterr().out


def test_the_highest_rate_is_searched_in_a_bounded_number_of_steps(
    server: BenchServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All requests at once keep the objective, so that each rate does too."""
    search = ("--find-rate", "--slo", "ttft=60s", "--rate", "40", "--steps", "2", "--step-seconds", "1")
    numbers = result_of(server, tmp_path / "r.json", *search, "--input", "7", "--output", "2", "--warmup", "0")
    assert [(step["rate"], step["keeps"]) for step in numbers["steps"]] == [(40, True), (80, True)]
    assert numbers["requests"] == 80 == numbers["steps"][-1]["report"]["requests"]
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 120  # each step has prompts of its own
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "step 1: 40 requests at 40 a second"
    assert re.fullmatch(r"    100\.0% keep ttft 60000 ms: enough \(.* answers/s, TTFT p99 .* ms.*\)", lines[1])
    assert lines[-1] == "the highest rate at which 99.0% of the requests keep ttft 60000 ms: 80 requests/s"


@pytest.mark.long
def test_a_search_without_a_first_rate_begins_at_half_of_what_is_answered(
    server: BenchServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    search = ("--find-rate", "--slo", "ttft=1ms", "--steps", "1", "--step-seconds", "1", "--warmup", "0")
    server.first_s = 0.05
    numbers = result_of(server, tmp_path / "r.json", *search, "--input", "7", "--output", "1")
    at_once, step = numbers["steps"]
    assert (at_once["rate"], at_once["keeps"], at_once["report"]["requests"]) == (None, False, 64)
    assert step["rate"] == pytest.approx(at_once["report"]["requests_per_s"] / 2)
    assert capfd.readouterr().err.splitlines()[-1].startswith("no rate was found at which 99.0%")


@pytest.mark.long
def test_rates_of_conversations_count_conversations(
    server: BenchServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first rate is half of the conversations that are answered a second, not of their requests."""
    search = ("--find-rate", "--slo", "ttft=60s", "--steps", "1", "--step-seconds", "1", "--warmup", "0")
    talks = ("--workload", "conversations", "--turns", "4", "--input", "2", "--output", "1")
    numbers = result_of(server, tmp_path / "r.json", *search, *talks)
    at_once, step = numbers["steps"]
    assert at_once["report"]["requests"] == 256
    assert step["rate"] == pytest.approx(at_once["report"]["requests_per_s"] / 4 / 2)
    assert step["report"]["requests"] == 4 * max(round(step["rate"]), 20)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "step 0: 64 conversations at once"
    assert re.fullmatch(r"step 1: \d+ conversations at .* a second", lines[2])
    assert lines[-1].endswith(" conversations/s")
    fixed = result_of(server, tmp_path / "r.json", *talks, "--rate", "100", "--requests", "3", "--warmup", "0")
    assert fixed["facts"]["arrivals"] == "100 conversations/s"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_prints_and_writes_what_there_is(
    server: BenchServer, tmp_path: Path, number: signal.Signals
) -> None:
    server.gap_s, file = 0.02, tmp_path / "r.json"
    arguments = ("--requests", "500", "--output", "5", "--concurrency", "4", "--warmup", "0", "--json", str(file))
    with started(server, *arguments, stdout=subprocess.PIPE) as process:
        while len(server.bodies) < 12:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    numbers = json.loads(file.read_text())
    assert 0 < numbers["requests"] < 400
    assert numbers["failed"] == 0
    assert numbers["output_tokens"] == 5 * numbers["requests"]
    assert f"requests        {numbers['requests']} (0 failed)" in out.decode()
    assert f"{numbers['unfinished']} requests were open when the run was stopped" in out.decode()


def test_a_search_that_is_stopped_has_what_there_is(server: BenchServer, tmp_path: Path) -> None:
    search = ("--find-rate", "--slo", "ttft=60s", "--rate", "20", "--step-seconds", "60", "--output", "2")
    with started(server, *search, "--warmup", "0", "--json", str(file := tmp_path / "r.json")) as process:
        while len(server.bodies) < 5:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    numbers = json.loads(file.read_text())
    assert numbers["steps"] == []  # none is complete
    assert 0 < numbers["requests"] < 100
    assert numbers["facts"]["arrivals"] == "the highest rate that keeps ttft 60000 ms"


def test_a_search_that_is_stopped_in_the_warm_up_says_that_nothing_was_measured(
    server: BenchServer, tmp_path: Path
) -> None:
    server.gap_s = 0.02
    search = ("--find-rate", "--slo", "ttft=60s", "--rate", "20", "--output", "1000", "--warmup", "2")
    with started(server, *search, "--json", str(file := tmp_path / "r.json"), stderr=subprocess.PIPE) as process:
        while len(server.bodies) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert err.decode().startswith("stopped: no rate was found at which 99.0%")
    numbers = json.loads(file.read_text())
    assert (numbers["steps"], numbers["requests"], numbers["unfinished"]) == ([], 0, 0)
    assert len(server.bodies) == 2


async def test_a_search_that_is_stopped_before_its_first_step_has_no_step(server: BenchServer) -> None:
    plan = make_plan(Settings(url=server.url, find_rate=True, slo="ttft=1s"))
    runner = Runner(Target(plan.address, plan.endpoint("m"), slo=plan.slo))
    runner.stop()
    measured, steps = await Search(plan, runner, print).run()
    assert (measured.report.requests, steps, server.bodies) == (0, [], [])


def test_a_terminal_shows_progress_and_percentiles(server: BenchServer) -> None:
    server.gap_s = 0.02
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "150"}
    arguments = ("--requests", "8", "--output", "50", "--concurrency", "4", "--warmup", "0")
    with started(server, *arguments, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        shown = b""
        while select.select([master], [], [], 60)[0]:
            try:
                shown += os.read(master, 65536)
            except OSError:  # the terminal's last user is gone
                break
        os.close(master)
    assert process.returncode == 0
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode()
    assert re.search(
        r"4/8 .* 4 open +\d+ tok/s +TTFT [\d.]+ m?s/[\d.]+ m?s +ITL [\d.]+ m?s/[\d.]+ m?s \(p50/p99\)", text
    )
    assert "requests        8 (0 failed)" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--url ftp://h", "only http:// and https:// are spoken here"),
        ("--url http://h?key=1", "name a server as http://HOST:PORT"),
        ("--url http://user@h", "a key is no part of it"),
        ("--url http://127.0.0.1:1", "127.0.0.1:1"),
        ("--ca none", "--ca is for https"),
        ("--burstiness 2", "--burstiness is of --rate"),
        ("--seconds 2", "--seconds alone is no bound"),
        ("--steps 2", "--steps is of --find-rate"),
        ("--find-rate", "looks for the highest rate that keeps --slo"),
        ("--find-rate --slo ttft=1 --requests 5", "--requests is not for --find-rate"),
        ("--extra-body [1]", "a JSON object"),
        ("--extra-body {", "--extra-body {"),
        ("--json none/there.json", "there is no folder none"),
        ("--turns 3", "--turns is not for the workload random"),
        ("--dataset none.json", "--dataset none.json: "),
        ("--dataset pyproject.toml", "--dataset pyproject.toml: "),
        ("--trace none.json --speed 2 --rate 3", "--speed is of a trace's own times"),
        ("--trace none.json --speed 2 --concurrency 3", "--speed is of a trace's own times"),
        ("--workload conversations --turns 1 --pause 2", "--pause is between turns"),
        ("--dataset none.json --pause 2", "--pause is between turns"),
        ("--requests 5 report a.json --report b.html", "--requests is no option of `baton bench report`"),
        ("report none.json --report b.html", "none.json"),
    ],
)
def test_what_cannot_be_run_is_one_line(arguments: str, words: str) -> None:
    with pytest.raises(Refusal, match=re.escape(words)):
        baton(*arguments.split())


def test_a_command_is_shown_without_its_key() -> None:
    words = ["baton", "bench", "--api-key", "secret", "--label", "my run", "--api-key=secret"]
    assert command_words(words) == "baton bench --api-key '***' --label 'my run' '--api-key=***'"
