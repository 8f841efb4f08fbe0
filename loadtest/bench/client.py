"""`python -m loadtest client`: drives an OpenAI server on this machine and prints how fast it answered.

    python -m loadtest client --workload decode
    python -m loadtest client --requests 64 --input 48 --output 128 --json result.json

The run ends by itself: the number of requests is fixed, and a request that is open after --timeout counts as failed.
`baton bench` has more: other servers, workloads, arrivals and pages.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import uvloop

from loadtest.bench import access
from loadtest.bench.drive import Pacing
from loadtest.bench.endpoints import Common, Completions
from loadtest.bench.lengths import Lengths
from loadtest.bench.prompts import HIGHEST_TOKEN_ID, LOWEST_TOKEN_ID, TokenIds
from loadtest.bench.report import Report
from loadtest.bench.runner import WARM_UP_SEED, Runner, Target
from loadtest.bench.server import first_model
from loadtest.bench.summary import summary
from loadtest.bench.workloads.random_lengths import NAMED, REQUESTS, RandomLengths
from loadtest.cannot_run import CannotRun
from loadtest.http_stream import HttpError


def main(arguments: list[str]) -> int:
    """Returns exit code 0 when every request was answered, 1 when one failed, 2 when there was no run."""
    options = _parser().parse_args(arguments)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(_run(options))
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
    parser.add_argument("--workload", choices=sorted(NAMED), default="decode", help="(%(default)s)")
    parser.add_argument("--requests", type=int, help="number of requests, instead of the workload's")
    parser.add_argument("--input", type=int, help="prompt tokens, instead of the workload's")
    parser.add_argument("--output", type=int, help="output tokens, instead of the workload's")
    parser.add_argument("--concurrency", type=int, help="requests at a time (default: all)")
    parser.add_argument("--warmup", type=int, default=4, help="requests before, not counted (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (%(default)s)")
    parser.add_argument("--highest-token-id", type=int, default=HIGHEST_TOKEN_ID, help="in prompts (%(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds for the warm-up, and for the run (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the numbers there too")
    return parser


async def _run(options: argparse.Namespace) -> Report:
    asked, prompts = _workload(options), TokenIds(options.highest_token_id)
    address = access.local_address(options.url, options.api_key, options.ca)
    access.check_local(options.admin_url)
    admin = access.admin_address(options.admin_url, options.ca)
    endpoint = Completions(Common(options.model or await first_model(address)))
    runner = Runner(Target(address, endpoint, admin))
    pacing = Pacing(options.concurrency, run_timeout_s=options.timeout)
    if options.warmup > 0:
        warm_up = replace(asked, num_scripts=options.warmup, prompts=prompts)
        await runner.warm_up(pacing, warm_up.scripts(options.seed + WARM_UP_SEED))
    scripts = replace(asked, prompts=prompts).scripts(options.seed)
    return (await runner.measure(pacing, scripts, asked.num_scripts)).report


def _workload(options: argparse.Namespace) -> RandomLengths:
    named = NAMED[options.workload]
    numbers = [
        default if given is None else given
        for given, default in (
            (options.requests, REQUESTS),
            (options.input, named.input.longest),
            (options.output, named.output.longest),
        )
    ]
    if min(*numbers, 1 if options.concurrency is None else options.concurrency) < 1:
        raise CannotRun("--requests, --input, --output and --concurrency are at least 1")
    if options.timeout <= 0:
        raise CannotRun("--timeout is above 0")
    if options.highest_token_id <= LOWEST_TOKEN_ID:
        raise CannotRun(f"--highest-token-id is above {LOWEST_TOKEN_ID}")
    requests, input, output = numbers
    return RandomLengths(requests, Lengths.fixed(input), Lengths.fixed(output))
