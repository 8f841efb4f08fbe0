"""`python -m loadtest overload`: what a server does with more requests than it can answer in time.

python -m loadtest overload --slo 2
python -m loadtest overload --slo 1 --input 200 --output 32 --times 1,5 --seconds 20
"""

import argparse
import asyncio
import sys
from pathlib import Path

import numpy as np
import uvloop

from loadtest.bench import access
from loadtest.bench.arrivals import arrivals
from loadtest.bench.drive import Pacing, drive
from loadtest.bench.endpoints import Common, Completions
from loadtest.bench.lengths import Lengths
from loadtest.bench.outcomes import Outcomes
from loadtest.bench.prompts import HIGHEST_TOKEN_ID, TokenIds
from loadtest.bench.report import latency, report
from loadtest.bench.server import first_model
from loadtest.bench.workloads.random_lengths import RandomLengths
from loadtest.cannot_run import CannotRun
from loadtest.http_stream import Address, HttpError
from loadtest.tables import Record, table, write_json

_REFUSALS = (429, 503)
_DRAIN_S = 120.0  # for answers after the last request was sent


def main(arguments: list[str]) -> int:
    """Returns exit code 0, 2 when there was no run."""
    options = _parser().parse_args(arguments)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            capacity, records = runner.run(_run(options))
    except (CannotRun, HttpError) as error:
        sys.stderr.write(f"loadtest: {error}\n")
        return 2
    sys.stdout.write(f"capacity {capacity:.2f} requests/s at {options.concurrency} at a time, SLO {options.slo:g} s\n")
    sys.stdout.write(table(records))
    if options.json is not None:
        write_json(records, options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest overload", description=__doc__.partition("\n")[0])
    access.add_options(parser)
    parser.add_argument("--slo", type=float, required=True, help="seconds in which a first token is in time")
    parser.add_argument("--input", type=int, default=200, help="prompt tokens (%(default)s)")
    parser.add_argument("--output", type=int, default=32, help="output tokens (%(default)s)")
    parser.add_argument("--times", default="0.5,1,2,5", help="rates, as multiples of the capacity (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each rate (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=16, help="to measure the capacity (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and gaps (%(default)s)")
    parser.add_argument("--highest-token-id", type=int, default=HIGHEST_TOKEN_ID, help="in prompts (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the numbers there too")
    return parser


async def _run(options: argparse.Namespace) -> tuple[float, list[Record]]:
    address = access.local_address(options.url, options.api_key, options.ca)
    endpoint = Completions(Common(await first_model(address)))
    seeds = iter(range(options.seed, options.seed + 100))
    capacity = await _capacity(address, endpoint, options, next(seeds))
    records: list[Record] = []
    for times in map(float, options.times.split(",")):
        rate, random = times * capacity, np.random.default_rng(next(seeds))
        number = max(1, round(rate * options.seconds))
        pacing = Pacing(arrivals=arrivals(rate, 1.0, number, random), timeout_s=_DRAIN_S)
        scripts = _workload(options, number).scripts(int(random.integers(2**31)))
        outcomes = await drive(address, endpoint, scripts, pacing)
        records.append(_record(times, outcomes, number / rate, options.slo))
    best = max(float(record["good_per_s"]) for record in records)
    for record in records:
        record["of_best"] = float(record["good_per_s"]) / best if best else 0.0
    return capacity, records


async def _capacity(address: Address, endpoint: Completions, options: argparse.Namespace, seed: int) -> float:
    """Measures the answers per second of a closed loop. Requests that a server refuses do not count."""
    if options.concurrency < 1:
        raise CannotRun("--concurrency is at least 1")
    scripts = _workload(options, 6 * options.concurrency).scripts(seed)
    found = report(await drive(address, endpoint, scripts, Pacing(options.concurrency, run_timeout_s=_DRAIN_S)))
    if (answered := found.requests - found.failed) < 2:
        raise CannotRun(f"the server answered {answered} of {found.requests} requests: {'; '.join(found.errors)}")
    return found.requests_per_s


def _workload(options: argparse.Namespace, requests: int) -> RandomLengths:
    prompts = TokenIds(options.highest_token_id)
    return RandomLengths(requests, Lengths.fixed(options.input), Lengths.fixed(options.output), prompts=prompts)


def _record(times: float, outcomes: Outcomes, seconds: float, slo_s: float) -> Record:
    answered, failed = outcomes.good, outcomes.failed
    refused = np.isin(failed.status, _REFUSALS)
    refused_after = latency((failed.last_s - failed.sent_s)[refused])
    ttft, num_good = latency(answered.ttft_s), int((answered.ttft_s <= slo_s).sum())
    return {
        "times": times,
        "offered_per_s": (len(answered) + len(failed)) / seconds,
        "good_per_s": num_good / seconds,
        "of_best": 0.0,
        "late": len(answered) - num_good,
        "refused": int(refused.sum()),
        "failed": int((~refused).sum()),
        "ttft_p50_ms": ttft.p50 if ttft else 0.0,
        "ttft_p99_ms": ttft.p99 if ttft else 0.0,
        "refused_after_ms": refused_after.p90 if refused_after else 0.0,
    }
