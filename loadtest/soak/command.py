"""`python -m loadtest soak`: a stack under mixed load and random faults, and what was lost, wrong or leaked.

    python -m loadtest soak --minutes 20 --seed 1
    python -m loadtest soak --minutes 20 --seed 1 --out soak.md --logs logs

It starts the stack, asks it for right answers while nothing is wrong with it, and then kills, freezes, partitions,
drains and restarts its processes while clients go on asking. Everything that was started ends with it.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import orjson
import uvloop

from loadtest.cannot_run import CannotRun
from loadtest.compare.machine import facts
from loadtest.http_stream import HttpError
from loadtest.processes import ProcessError
from loadtest.soak.background import BackgroundTraffic, known_answers
from loadtest.soak.cases import cases
from loadtest.soak.faults import Faults
from loadtest.soak.leaks import leaked
from loadtest.soak.memory import Memory
from loadtest.soak.schedule import schedule
from loadtest.soak.stack import MODEL_NAME, START_S, SoakStack, all_connected, running_stack
from loadtest.soak.traffic import Traffic
from loadtest.soak.verdict import Result, complaints, table

_CLIENTS, _CASES = 10, 400
_BACKGROUND_CLIENTS, _BACKGROUND_CASES = 3, 24


def main(arguments: list[str]) -> int:
    """Returns exit code 0 when nothing was lost, wrong or leaked and enough happened, 1 otherwise, 2 for no run."""
    options = _parser().parse_args(arguments)
    result: Result | None = None
    sys.stdout.write(f"seed {options.seed}\n")
    sys.stdout.flush()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="soak-") as folder,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            logs = options.logs or Path(folder)
            logs.mkdir(parents=True, exist_ok=True)
            result = runner.run(_run(options, logs))
    except* (CannotRun, ProcessError, HttpError, TimeoutError, OSError) as errors:
        for error in _leaves(errors):
            sys.stderr.write(f"loadtest: {error}\n")
    return 2 if result is None else _report(result, options, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="of load and faults (%(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, requests and faults (%(default)s)")
    parser.add_argument("--clients", type=int, default=_CLIENTS, help="each has one request at a time (%(default)s)")
    parser.add_argument("--cases", type=int, default=_CASES, help="different prompts (%(default)s)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keeps the output of each process there")
    parser.add_argument("--out", type=Path, metavar="FILE", help="writes the result there too, as Markdown")
    return parser


async def _run(options: argparse.Namespace, logs: Path) -> Result:
    async with running_stack(logs) as stack:
        calm = stack.gateways["gateway-0"]
        known = await cases(calm, MODEL_NAME, options.seed, options.cases)
        in_background = await known_answers(calm, MODEL_NAME, options.seed, _BACKGROUND_CASES)
        sys.stdout.write(f"{len(known) + len(in_background)} answers are known; faults begin\n")
        sys.stdout.flush()
        memory, faults = Memory(stack.pids), Faults(stack)
        traffic = Traffic(stack.doors, MODEL_NAME, known, options.seed, _killed(stack))
        background = BackgroundTraffic(
            stack.gateways, MODEL_NAME, in_background, options.seed, _killed(stack), traffic.counts
        )
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as watching:
            watchers = [watching.create_task(memory.watch()), watching.create_task(stack.watch())]
            async with asyncio.TaskGroup() as load:
                load.create_task(traffic.run(options.clients, 60 * options.minutes))
                load.create_task(background.run(_BACKGROUND_CLIENTS, 60 * options.minutes))
                load.create_task(faults.run(schedule(options.seed, options.minutes)))
            await all_connected(stack, START_S)
            left = await leaked(stack)
            for task in watchers:
                task.cancel()
        return Result(
            seed=options.seed,
            minutes=options.minutes,
            counts=traffic.counts,
            faults=faults.done,
            moved=_moved(stack.members[name].log for name in stack.gateways),
            left=left,
            growths=memory.growths(began_s + 15 * options.minutes),
            ended_by_themselves=stack.ended_by_themselves,
            unclean=faults.unclean,
            outlasted=faults.outlasted,
        )


def _killed(stack: SoakStack) -> Callable[[str, float], bool]:
    def killed(name: str, since_s: float) -> bool:
        member = stack.members[name]
        # Redis keeps nothing on a disk here: one that is restarted has lost as much as one that is killed.
        return member.began_since(since_s) if name == "redis" else member.killed_since(since_s)

    return killed


def _moved(logs: Iterable[Path]) -> int:
    """Counts the requests that a gateway placed again, by its lines `placed`."""
    moved = set()
    for log in logs:
        for line in log.read_bytes().splitlines():
            with suppress(orjson.JSONDecodeError):  # the last line of a killed process
                entry = orjson.loads(line)
                if entry.get("event") == "placed" and entry["attempt"] > 1:
                    moved.add(entry["request_id"])
    return len(moved)


def _report(result: Result, options: argparse.Namespace, arguments: list[str]) -> int:
    wrongs = complaints(result)
    text = table(result) + "\n" + ("".join(f"- RED: {each}\n" for each in wrongs) or "Nothing lost, wrong or leaked.\n")
    sys.stdout.write(text)
    for wish in result.counts.wrong_wishes:
        sys.stdout.write(f"wrong: {wish}\n")
    for wish in result.counts.lost_wishes:
        sys.stdout.write(f"lost: {wish}\n")
    if options.out is not None:
        head = facts(["python -m loadtest soak", *arguments], None, None, [0, 1])
        lines = "\n".join(f"- {name}: {value}" for name, value in head.items())
        options.out.write_text(f"# Soak\n\n{lines}\n\n{text}")
    return 1 if wrongs else 0


def _leaves(errors: BaseExceptionGroup[BaseException]) -> Iterable[BaseException]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
