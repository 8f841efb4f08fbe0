"""Who is compared with whom, and how llama.cpp's server is started."""

from pathlib import Path

import pytest

from loadtest.compare.command import main
from loadtest.compare.llama_cpp import SLOTS, LlamaCpp, Weights
from loadtest.compare.matches import Match, Peers, chosen, matches, servers
from loadtest.compare.vllm import openmp
from loadtest.compare.workloads import ALL, LONGEST

WEIGHTS = Weights(bf16=Path("bf16.gguf"), q4_1=Path("q4_1.gguf"))
EVERYBODY = Peers(Path("venv"), Path("llama-server"), WEIGHTS)


def names(found: list[Match]) -> list[tuple[str, tuple[str, ...]]]:
    return [(match.contest.baton, match.contest.peers) for match in found]


def test_llama_cpp_meets_baton_with_automatic_routing() -> None:
    assert names(matches(Path("model"), EVERYBODY, alone=True)) == [
        ("baton-always", ("vllm-pair-32", "vllm-pair-128")),
        ("baton-auto", ("vllm-alone-32", "vllm-alone-128")),
        ("baton-auto", ("llama-bf16",)),
        ("baton-auto", ("llama-q4_1",)),
        ("baton-always", ("baton-never",)),
    ]


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        (Peers(Path("venv"), None, None), {"vllm-pair-32", "vllm-pair-128", "vllm-alone-32", "vllm-alone-128"}),
        (Peers(None, Path("llama-server"), WEIGHTS), {"llama-bf16", "llama-q4_1"}),
        (Peers(None, Path("llama-server"), Weights(bf16=Path("bf16.gguf"))), {"llama-bf16"}),
        (Peers(None, Path("llama-server"), Weights(own=Path("model.gguf"))), {"llama-same-file"}),
    ],
)
def test_a_peer_that_is_not_there_has_no_part(peers: Peers, expected: set[str]) -> None:
    found = servers(matches(Path("model"), peers, alone=False))
    assert {server.name for server in found if not server.name.startswith("baton")} == expected


def test_each_server_runs_once_however_many_matches_it_has() -> None:
    found = [server.name for server in servers(matches(Path("model"), EVERYBODY, alone=True))]
    assert len(set(found)) == len(found) == 9


def test_peers_are_chosen_by_name() -> None:
    every = matches(Path("model"), EVERYBODY, alone=True)
    assert names(chosen(every, ["llama-bf16", "vllm-pair-32"])) == [
        ("baton-always", ("vllm-pair-32",)),
        ("baton-auto", ("llama-bf16",)),
    ]
    with pytest.raises(ValueError, match="no peer 'ollama'"):
        chosen(every, ["ollama"])


def test_llama_server_has_a_slot_for_each_request_that_holds_the_longest() -> None:
    launch = LlamaCpp(Path("llama-server"), Path("bf16.gguf"), "bf16").launch([8000])
    (process,) = launch.processes
    options = dict(zip(process.command[1::2], process.command[2::2], strict=False))
    assert (options["--model"], options["--port"], options["--host"]) == ("bf16.gguf", "8000", "127.0.0.1")
    slots, context = int(options["--parallel"]), int(options["--ctx-size"])
    assert slots == SLOTS >= max(workload.concurrency for workload in ALL if not workload.load.prefix_tokens)
    assert context // slots >= LONGEST


def test_without_a_peer_there_is_no_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "model"]) == 2
    assert "name --vllm or --llama-server" in capsys.readouterr().err


def test_vllm_has_no_part_where_the_model_is_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (library := openmp(tmp_path)).parent.mkdir(parents=True)
    library.touch()
    assert main(["--vllm", str(tmp_path), "--model", "model.gguf"]) == 2
    assert "model.gguf is a GGUF file, which vLLM does not serve" in capsys.readouterr().err
