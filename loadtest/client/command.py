"""`python -m loadtest client`: drives an OpenAI server on this machine and prints how fast it answered.

    python -m loadtest client --workload decode
    python -m loadtest client --requests 64 --input 48 --output 128 --json result.json

The run ends by itself: the number of requests is fixed, and a request that is open after --timeout counts as failed.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import orjson
import uvloop

from loadtest import http_stream
from loadtest.cannot_run import CannotRun
from loadtest.client import access, counters, workload
from loadtest.client.drive import Outcome, drive
from loadtest.client.report import Report, report, summary
from loadtest.client.workload import Workload
from loadtest.http_stream import Address, HttpError

_ANSWER_TIMEOUT_S = 10.0  # of a request that costs nothing


def main(arguments: list[str]) -> int:
    """Returns exit code 0 when every request was answered, 1 when one failed, 2 when there was no run."""
    options = _parser().parse_args(arguments)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(_run(options))
    except TimeoutError:
        sys.stderr.write(f"loadtest: no answer within {_ANSWER_TIMEOUT_S:g} s\n")
        return 2
    except (CannotRun, HttpError) as error:
        sys.stderr.write(f"loadtest: {error}\n")
        return 2
    sys.stdout.write(summary(result) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(result.as_dict(), indent=2) + "\n")
    return 1 if result.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest client", description=__doc__.partition("\n")[0])
    access.add_options(parser)
    parser.add_argument(
        "--admin-url", default="http://127.0.0.1:9001", help="Baton's admin port, for its counters (%(default)s)"
    )
    parser.add_argument("--model", help="name of the model (default: the first one that the server names)")
    parser.add_argument("--workload", choices=sorted(workload.NAMED), default="decode", help="(%(default)s)")
    parser.add_argument("--requests", type=int, help="number of requests, instead of the workload's")
    parser.add_argument("--input", type=int, help="prompt tokens, instead of the workload's")
    parser.add_argument("--output", type=int, help="output tokens, instead of the workload's")
    parser.add_argument("--concurrency", type=int, help="requests at a time (default: all)")
    parser.add_argument("--warmup", type=int, default=4, help="requests before, not counted (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (%(default)s)")
    parser.add_argument("--highest-token-id", type=int, default=4000, help="in prompts (%(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds for the warm-up, and for the run (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the numbers there too")
    return parser


async def _run(options: argparse.Namespace) -> Report:
    address, admin = (access.local_address(url, options) for url in (options.url, options.admin_url))
    asked = _workload(options)
    async with asyncio.timeout(_ANSWER_TIMEOUT_S):
        model = options.model or await first_model(address)

    async def run(wanted: Workload, seed: int) -> list[Outcome]:
        prompts = workload.prompts(wanted, seed, options.highest_token_id)
        concurrency = options.concurrency or wanted.requests
        return await drive(address, model, prompts, wanted.output_tokens, concurrency, options.timeout)

    if options.warmup > 0:
        await run(replace(asked, requests=options.warmup), options.seed + 1_000_003)
    before = await _counters(admin)
    outcomes = await run(asked, options.seed)
    after = await _counters(admin)
    return report(outcomes, counters.difference(before, after) if before and after else None)


async def _counters(address: Address) -> counters.Reading | None:
    async with asyncio.timeout(_ANSWER_TIMEOUT_S):
        return await counters.read(address)


def _workload(options: argparse.Namespace) -> Workload:
    named = workload.NAMED[options.workload]
    asked = Workload(
        requests=named.requests if options.requests is None else options.requests,
        input_tokens=named.input_tokens if options.input is None else options.input,
        output_tokens=named.output_tokens if options.output is None else options.output,
    )
    if min(asked.requests, asked.input_tokens, asked.output_tokens) < 1:
        raise CannotRun("--requests, --input and --output are at least 1")
    return asked


async def first_model(address: Address) -> str:
    """The first model that a server names. Raises HttpError."""
    answer = (await http_stream.ask(address, "/v1/models", None)).body()
    name: str = orjson.loads(answer)["data"][0]["id"]
    return name
