"""`python -m loadtest micro PART`: prints a table of what one part of Baton costs, and writes it with `--json FILE`.

A part is a module of this package with `measure(...)`, which takes the part's options and returns its records, or a
coroutine of them.
"""

import argparse
import asyncio
import inspect
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from loadtest.cannot_run import CannotRun
from loadtest.tables import Record, table, write_json


@dataclass(frozen=True, slots=True)
class _Part:
    about: str
    options: tuple[tuple[str, int | None, str], ...] = ()  # name, default, help; without a default: a path


_PARTS = {
    "console": _Part(
        "a gateway's CPU with 1,000 requests in flight and no, one or three consoles open; a row, and a noted prefix",
        (("rounds", 3, "rounds, of each figure the median"), ("seconds", 8, "how long each is measured")),
    ),
    "gateway": _Part(
        "a gateway's CPU for each request and each token, with workers whose model costs nothing",
        (
            ("rounds", 3, "rounds, of each figure the median"),
            ("model", None, "with a tokenizer and a chat template, instead of the random model"),
            ("tls", 0, "1: gateways that speak TLS with their workers are measured too"),
            ("dynamo", None, "virtual environment with NVIDIA Dynamo, whose front end is then measured too"),
        ),
    ),
    "gc": _Part(
        "what steady decoding leaves for the garbage collector, and how often that runs",
        (("steps", 10_000, "steps of each batch"),),
    ),
    "handoff": _Part(
        "one handoff between two workers without a model, and the same read by NIXL alone",
        (("rounds", 12, "handoffs of each size"),),
    ),
    "idle": _Part(
        "the CPU of Baton's processes while nobody asks them for anything",
        (("seconds", 20, "how long"), ("model", None, "the checkpoint, instead of the random model")),
    ),
    "index": _Part(
        "the prefix index in Redis: lookups, publishing, memory",
        (("blocks", 1_000_000, "(block, worker) pairs"),),
    ),
    "interference": _Part(
        "a decode step beside streams to gateways, submits of long prompts and publishing",
        (("batch", 256, "sequences"), ("steps", 300, "steps of each round"), ("rounds", 2, "rounds of each kind")),
    ),
    "kquants": _Part(
        "products of GGUF's Q4_K, Q5_K and Q6_K, in turns with the same in simpler codes; another class: BATON_CPU_ISA",
        (
            ("threads", 1, "threads; 0: one on each core"),
            ("rounds", 30, "rounds, of which the shortest counts"),
            ("float32", 0, "1: in float32, and not in bfloat16"),
        ),
    ),
    "kv": _Part(
        "attention of a decode step over KV in bfloat16, int8 and e4m3, in turns; of another class: BATON_CPU_ISA",
        (
            ("rows", 64, "sequences"),
            ("tokens", 600, "of each"),
            ("layers", 12, "of the model"),
            ("kv-heads", 4, "of a layer"),
            ("head-dim", 64, "of a head"),
            ("group", 3, "query heads of a KV head"),
            ("rounds", 5, "rounds, of which the median counts"),
        ),
    ),
    "latent": _Part(
        "attention of a decode step over latents, beside K and V of as many heads: time, and KV bytes by the plan",
        (
            ("context", 4096, "tokens of each sequence"),
            ("rows", 4, "sequences"),
            ("threads", 1, "threads of the kernels"),
            ("rounds", 7, "rounds, each in a process of its own; of each figure the median"),
            ("runs", 15, "runs of each kind in a round, by turns"),
            ("before", None, "another tree of this repository, whose dense attention is measured by turns too"),
        ),
    ),
    "model": _Part(
        "where a step's time goes in the model, beside what memory and cores allow; of another class: BATON_CPU_ISA",
        (
            ("model", None, "the checkpoint"),
            ("context", 120, "tokens of each sequence that decodes"),
            ("float32", 0, "1: in float32, and not in bfloat16"),
        ),
    ),
    "packed": _Part(
        "steps over weights in codes beside the same in numbers, and from how many rows on codes are unpacked",
        (
            ("model", None, "the checkpoint or GGUF file, instead of the demo model"),
            ("context", 120, "tokens of each sequence that decodes"),
            ("float32", 0, "1: in float32, and not in bfloat16"),
        ),
    ),
    "pauses": _Part(
        "how long one request can hold a gateway's event loop: the worst requests, each beside a small one",
        (("rounds", 3, "rounds, of which the best one counts"),),
    ),
    "prefix": _Part("admission of prompts of 1k to 128k tokens, cold and cached, beside the gateway's hashing"),
    "products": _Part(
        "products in int8, in turns with bfloat16, beside the peaks of the cores; of another class: BATON_CPU_ISA",
        (
            ("model", None, "a model whose steps are measured too, rounded to int8 when it is loaded"),
            ("threads", 0, "threads; 0: one on each core"),
            ("rounds", 7, "rounds, of which the shortest counts"),
            ("float32", 0, "1: beside float32, and not bfloat16"),
        ),
    ),
    "rank_sums": _Part(
        "sums over two ranks of this host, by kernels and by Gloo, in turns; of another class: BATON_CPU_ISA",
        (("rounds", 9, "rounds, of which the median counts"),),
    ),
    "ranks": _Part(
        "steps of a model on several ranks, in turns with one process that has as many threads",
        (
            ("model", None, "the checkpoint, or a directory without weights, instead of the demo model"),
            ("ranks", 2, "ranks"),
            ("context", 120, "tokens of each sequence that decodes"),
            ("rounds", 5, "rounds, of which the median counts"),
        ),
    ),
    "rank_experts": _Part(
        "steps of a model with experts on ranks that have whole ones, in turns with ranks that have columns of all",
        (
            ("model", None, "the checkpoint, or a directory without weights, instead of a random model"),
            ("ranks", 2, "ranks"),
            ("context", 120, "tokens of each sequence that decodes"),
            ("rounds", 5, "rounds, of which the median counts"),
        ),
    ),
    "rank_pairs": _Part(
        "KV blocks between two processes of this host, by the ranks of their workers, over NIXL and over gRPC",
        (("rounds", 11, "reads of each pair, in turns"),),
    ),
    "scheduler": _Part(
        "a decode step without the model: schedule, blocks, stop checks, frames",
        (("steps", 400, "steps of each batch"),),
    ),
    "stages": _Part(
        "prompts on a model's stages, in turns with one process and with ranks that have as many threads",
        (
            ("model", None, "the checkpoint, or a directory without weights, instead of the demo model"),
            ("stages", 2, "stages, and ranks beside them"),
            ("rounds", 5, "rounds, of which the median counts"),
        ),
    ),
    "staging": _Part(
        "what the host does for a decode step on a GPU, but for launches: index work and one copy",
        (("steps", 400, "steps of each kind"),),
    ),
    "step": _Part(
        "a decode step beside the publishing of the blocks that it fills",
        (("batch", 256, "sequences"),),
    ),
    "structured": _Part(
        "grammars: the first mask of a schema, masks of a batch, decode steps with masks beside steps without",
        (("model", None, "the checkpoint, instead of the demo model"),),
    ),
    "transport": _Part("KV blocks between two processes of this host, over NIXL and over gRPC"),
}


def main(arguments: list[str]) -> int:
    """Measures the part that the arguments name, prints its table, and returns exit code 0, 2 when there was no run."""
    name, chosen, path = _options(arguments)
    try:
        records = _measure(name, chosen)
    except CannotRun as error:
        sys.stderr.write(f"loadtest: {error}\n")
        return 2
    sys.stdout.write(table(records))
    if path is not None:
        write_json(records, path)
    return 0


def _options(arguments: list[str]) -> tuple[str, dict[str, int | Path | None], Path | None]:
    parser = argparse.ArgumentParser(prog="python -m loadtest micro", description=__doc__.partition("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    for name, part in _PARTS.items():
        of_part = parts.add_parser(name, help=part.about, description=part.about)
        for option, default, meaning in part.options:
            if default is None:
                of_part.add_argument(f"--{option}", type=Path, metavar="DIR", help=meaning)
            else:
                of_part.add_argument(f"--{option}", type=int, default=default, help=f"{meaning} (%(default)s)")
        of_part.add_argument("--json", type=Path, metavar="FILE", help="writes the records there as well")
    given = vars(parser.parse_args(arguments))
    return given.pop("part"), given, given.pop("json")


def _measure(name: str, options: dict[str, int | Path | None]) -> list[Record]:
    found = import_module(f"loadtest.micro.{name}").measure(**options)
    records: list[Record] = asyncio.run(found) if inspect.iscoroutine(found) else found
    return records
