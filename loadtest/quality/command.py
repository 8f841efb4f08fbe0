"""`python -m loadtest quality`: one model's answers beside another's, or beside the same model's in fewer bits.

    python -m loadtest quality --model demo --against DIR
    python -m loadtest quality --model DIR --against DIR --b-args="--quantization int8"
    python -m loadtest quality --model http://127.0.0.1:8000 --against http://127.0.0.1:8001 --parts perplexity

A and B are models that `baton up` serves for the run, one after the other, `demo` its demo model; or URLs of servers of
OpenAI's API on this machine which give logprobs of prompts and token ids as vLLM and Baton do.
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from loadtest.cannot_run import CannotRun
from loadtest.compare.machine import facts
from loadtest.http_stream import HttpError
from loadtest.processes import ProcessError
from loadtest.quality.agreement import Agreement
from loadtest.quality.asked import AskedServer, Skipped
from loadtest.quality.book import SOURCE
from loadtest.quality.formats import JsonAnswers, ToolCalls
from loadtest.quality.lines import Line, NoLine, table
from loadtest.quality.part import Part
from loadtest.quality.perplexity import Perplexity
from loadtest.quality.recall import Recall
from loadtest.quality.sides import Side, opened

_PARTS: tuple[Part[Any], ...] = (
    Perplexity(),
    Agreement(),
    Recall(2000),
    Recall(8000),
    JsonAnswers(held=False),
    JsonAnswers(held=True),
    ToolCalls(held=False),
    ToolCalls(held=True),
)
_NAMES = [part.name for part in _PARTS]


def main(arguments: list[str]) -> int:
    """Returns exit code 0 when there is a table, with whatever figures; 2 when there is none."""
    options = _parser().parse_args(arguments)
    try:
        sides = _sides(options)
        wanted = [part for part in _PARTS if part.name in options.parts]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            lines = runner.run(_run(sides, wanted))
    except (CannotRun, HttpError, ProcessError, OSError) as error:
        sys.stderr.write(f"loadtest: {error}\n")
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write("loadtest: interrupted; everything that it started has ended\n")
        return 130
    text = _document(["python -m loadtest quality", *map(shlex.quote, arguments)], sides, lines)
    sys.stdout.write(text)
    if options.markdown is not None:
        options.markdown.write_text(text)
    if options.json is not None:
        options.json.write_text(json.dumps([line.record() for line in lines], indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, metavar="A", help="a model for `baton up --model`, `demo`, or a URL")
    parser.add_argument("--against", required=True, metavar="B", help="the other one, likewise")
    parser.add_argument(
        "--a-args", type=shlex.split, default=[], metavar="OPTIONS", help="further ones of A's baton up"
    )
    parser.add_argument(
        "--b-args", type=shlex.split, default=[], metavar="OPTIONS", help="further ones of B's baton up"
    )
    parser.add_argument("--parts", type=_parts, default=_NAMES, metavar="PART,...", help=f"of {', '.join(_NAMES)}")
    parser.add_argument("--api-key", metavar="KEY", help="a key, where a URL's server asks for one")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="authority of an https server's certificate")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="writes the table there too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the figures there")
    return parser


def _parts(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in _NAMES]:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}; there are {', '.join(_NAMES)}")
    return names


def _sides(options: argparse.Namespace) -> tuple[Side, Side]:
    asked = ((options.model, options.a_args), (options.against, options.b_args))
    a, b = (Side(of, tuple(further), options.api_key, options.ca) for of, further in asked)
    return a, b


async def _run(sides: tuple[Side, Side], parts: Sequence[Part[Any]]) -> list[Line | NoLine]:
    """Asks one side after the other, and compares. SIGTERM ends it as Ctrl-C does, with everything that it started."""
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    a, b = [await _answers(side, parts) for side in sides]
    return [line for part in parts for line in compared(part, a[part.name], b[part.name])]


async def _answers(side: Side, parts: Sequence[Part[Any]]) -> dict[str, Any]:
    """Asks one side for all parts: the answers by the part's name, or why there are none."""
    async with opened(side) as server:
        _tell(f"{side.words}: {server.model}, up to {server.max_model_len} tokens")
        return {part.name: await _asked(part, server) for part in parts}


async def _asked(part: Part[Any], server: AskedServer) -> Any:
    began_s = asyncio.get_running_loop().time()
    try:
        answers = await part.ask(server)
    except Skipped as skipped:
        _tell(f"    {part.name}: skipped: {skipped}")
        return skipped
    _tell(f"    {part.name}: {asyncio.get_running_loop().time() - began_s:.0f} s")
    return answers


def compared(part: Part[Any], a: Any, b: Any) -> Sequence[Line | NoLine]:
    """Makes a part's lines of two sides' answers, each of which may be the error that says why there are none."""
    for side, answers in (("A", a), ("B", b)):
        if isinstance(answers, Skipped):
            return [NoLine(part.name, f"{side}: {answers}")]
    try:
        return part.compare(a, b)
    except Skipped as skipped:
        return [NoLine(part.name, str(skipped))]


def _document(command: list[str], sides: tuple[Side, Side], lines: Sequence[Line | NoLine]) -> str:
    head = facts(command, None, None, sorted(os.sched_getaffinity(0)))
    told = {**head, "A": f"`{sides[0].words}`", "B": f"`{sides[1].words}`", "text": SOURCE}
    return "# Quality\n\n" + "\n".join(f"- {name}: {value}" for name, value in told.items()) + f"\n\n{table(lines)}\n"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
