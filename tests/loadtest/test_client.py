"""The client against a real HTTP server that answers like an OpenAI server, well or badly."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.__main__ import main
from tests.loadtest.bench_server import BenchServer, serving


@pytest.fixture
def server() -> Iterator[BenchServer]:
    with serving(BenchServer(text="é\n")) as running:
        yield running


def run(server: BenchServer, *arguments: str) -> int:
    return main(
        ["--url", server.url, "--admin-url", server.url, "--requests", "5", "--input", "7", "--output", "3", *arguments]
    )


def test_it_asks_for_what_was_said_and_reports_every_token(server: BenchServer, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    assert run(server, "--warmup", "2", "--json", str(result)) == 0
    assert len(server.bodies) == 7
    for body in server.bodies:
        assert body["model"] == "the-model"
        assert len(body["prompt"]) == 7
        assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (3, 0, True)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 7
    numbers = json.loads(result.read_text())
    assert (numbers["requests"], numbers["failed"], numbers["output_tokens"]) == (5, 0, 15)
    assert numbers["ttft_ms"]["p50"] > 0
    assert numbers["handed_off"] == 1.0
    assert numbers["kv_bytes_moved"] == 5000  # without those of the warm-up


@pytest.mark.long
def test_the_same_seed_asks_the_same(server: BenchServer) -> None:
    for seed in ("1", "1", "2"):
        run(server, "--warmup", "0", "--seed", seed)
    prompts = [sorted(tuple(body["prompt"]) for body in server.bodies[at : at + 5]) for at in (0, 5, 10)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_errors_are_told_and_counted(server: BenchServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = 503
    assert run(server) == 1
    assert "5 failed" in (text := capsys.readouterr().out)
    assert "status 503" in text
    assert "5 × status 503" in text


def test_it_ends_by_itself_when_the_server_does_not(server: BenchServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.first_s = 60
    assert run(server, "--timeout", "0.3", "--warmup", "0") == 1
    assert "not finished after 0.3 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "url", ["http://192.0.2.1:8000", "https://192.0.2.1:8000", "http://example.org", "ftp://127.0.0.1", "nonsense"]
)
def test_load_is_for_this_machine_only(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", url]) == 2
    assert capsys.readouterr().err.startswith(f"loadtest: {url}: ")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--concurrency 0", "--concurrency are at least 1"),
        ("--output -1", "--output and --concurrency are at least 1"),
        ("--timeout 0", "--timeout is above 0"),
        ("--highest-token-id 100", "--highest-token-id is above 100"),
    ],
)
def test_a_run_of_nothing_is_refused(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(option.split()) == 2
    assert words in capsys.readouterr().err


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("loadtest: 127.0.0.1:1: ")
