"""`python -m loadtest overload`: what a server does with more requests than it can answer in time.

python -m loadtest overload --slo 2
python -m loadtest overload --slo 1 --input 200 --output 32 --times 1,5 --seconds 20
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

import numpy as np
import uvloop

from loadtest.cannot_run import CannotRun
from loadtest.client import access, workload
from loadtest.client.command import first_model
from loadtest.client.drive import Outcome, drive, read_answers, request_body, send
from loadtest.client.workload import Workload
from loadtest.http_stream import Address, Answer, HttpError
from loadtest.tables import Record, table, write_json

_REFUSALS = ("status 429", "status 503")
_DRAIN_S = 120.0  # for answers after the last request was sent


def main(arguments: list[str]) -> int:
    """Returns exit code 0, 2 when there was no run."""
    options = _parser().parse_args(arguments)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            capacity, records = runner.run(_run(options))
    except (CannotRun, HttpError, TimeoutError) as error:
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
    parser.add_argument("--highest-token-id", type=int, default=4000, help="in prompts (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the numbers there too")
    return parser


async def _run(options: argparse.Namespace) -> tuple[float, list[Record]]:
    address = access.local_address(options.url, options)
    model = await first_model(address)
    seeds = iter(range(options.seed, options.seed + 100))
    capacity = await _capacity(address, model, options, next(seeds))
    records: list[Record] = []
    for times in map(float, options.times.split(",")):
        rate, random = times * capacity, np.random.default_rng(next(seeds))
        gaps = random.exponential(1 / rate, max(1, round(rate * options.seconds))).tolist()
        wanted = Workload(len(gaps), options.input, options.output)
        prompts = workload.prompts(wanted, int(random.integers(2**31)), options.highest_token_id)
        outcomes = await _open_loop(address, model, prompts, gaps, options.output)
        records.append(_record(times, outcomes, sum(gaps), options.slo))
    best = max(float(record["good_per_s"]) for record in records)
    for record in records:
        record["of_best"] = float(record["good_per_s"]) / best if best else 0.0
    return capacity, records


async def _capacity(address: Address, model: str, options: argparse.Namespace, seed: int) -> float:
    """Measures the answers per second of a closed loop. Requests that a server refuses do not count."""
    wanted = Workload(6 * options.concurrency, options.input, options.output)
    prompts = workload.prompts(wanted, seed, options.highest_token_id)
    outcomes = await drive(address, model, prompts, options.output, options.concurrency, _DRAIN_S)
    good = [outcome for outcome in outcomes if outcome.error is None]
    if len(good) < 2:
        raise CannotRun(f"the server answered {len(good)} of {len(outcomes)} requests: {outcomes[0].error}")
    return len(good) / (max(outcome.parts_s[-1] for outcome in good) - min(outcome.sent_s for outcome in good))


async def _open_loop(
    address: Address, model: str, prompts: list[list[int]], gaps: list[float], output_tokens: int
) -> list[Outcome]:
    """Sends each prompt after its gap, in seconds, whatever has become of those before."""
    outcomes = [Outcome() for _ in prompts]
    answers: list[tuple[Outcome, Answer]] = []

    async def one(prompt: list[int], outcome: Outcome) -> None:
        try:
            async with asyncio.timeout(_DRAIN_S):
                answers.append((outcome, await send(address, request_body(model, prompt, output_tokens), outcome)))
        except TimeoutError:
            outcome.error = f"not finished after {_DRAIN_S:g} s"
        except HttpError as error:
            outcome.error = str(error)

    async with asyncio.TaskGroup() as requests:
        at = time.perf_counter()
        for prompt, outcome, gap in zip(prompts, outcomes, gaps, strict=True):
            at += gap
            await asyncio.sleep(at - time.perf_counter())
            requests.create_task(one(prompt, outcome))
    read_answers(answers)
    return outcomes


def _record(times: float, outcomes: list[Outcome], seconds: float, slo_s: float) -> Record:
    answered = [outcome for outcome in outcomes if outcome.error is None]
    good = [outcome for outcome in answered if outcome.ttft_s <= slo_s]
    refused = [outcome for outcome in outcomes if outcome.error is not None and outcome.error.startswith(_REFUSALS)]
    refused_ms = [1000 * outcome.ttft_s for outcome in refused if outcome.parts_s]
    return {
        "times": times,
        "offered_per_s": len(outcomes) / seconds,
        "good_per_s": len(good) / seconds,
        "of_best": 0.0,
        "late": len(answered) - len(good),
        "refused": len(refused),
        "failed": len(outcomes) - len(answered) - len(refused),
        "ttft_p50_ms": float(np.percentile([1000 * one.ttft_s for one in answered], 50)) if answered else 0.0,
        "ttft_p99_ms": float(np.percentile([1000 * one.ttft_s for one in answered], 99)) if answered else 0.0,
        "refused_after_ms": float(np.percentile(refused_ms, 90)) if refused_ms else 0.0,
    }
