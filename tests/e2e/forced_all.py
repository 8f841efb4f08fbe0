"""Runs odd shapes of all families with every request handed off, one after the other, and prints a table.

    python -m tests.e2e.forced_all [NAME ...] [--transport nixl] [--ranks 2:1] [--stages 2] [--whole-experts decode]
        2> LOG

A name is that of a shape or a family; none: all of them. Ranks are those of each prefill and of each decode worker,
stages those of each prefill worker, whole experts those of the ranks of a role.
What the stacks' processes print goes to standard error.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TextIO

from tests.e2e.forced_checks import CHECKS
from tests.e2e.forced_shapes import SHAPES, names_of
from tests.e2e.forced_stack import ROLES, TRANSPORTS, Division, ForcedStack, Ranks, forced_stack


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a check."""

    took_s: float
    problem: str = ""  # the error and where it was; empty: the check holds


def run_checks(forced: ForcedStack) -> dict[str, Result]:
    """Runs all checks, also those after one that fails. After each, no block may stay taken."""
    return {name: run_check(name, forced) for name in CHECKS}


def run_check(name: str, forced: ForcedStack, baseline_s: float = 120.0) -> Result:
    """Runs a check, after which blocks may stay taken for so many seconds, and mends the stack if it fails."""
    began = time.monotonic()
    try:
        CHECKS[name](forced)
        forced.gateway.wait_for_baseline(baseline_s)
    except Exception:  # of any kind: the others run all the same, and this one is told
        forced.stack.heal()
        return Result(time.monotonic() - began, traceback.format_exc())
    return Result(time.monotonic() - began)


def _chosen(names: list[str]) -> list[str]:
    """The shapes of these names. Raises SystemExit for a name that nothing has."""
    found: list[str] = []
    for name in names or SHAPES:
        shapes = [name] if name in SHAPES else names_of(name)
        if not shapes:
            raise SystemExit(f"no shape or family is called {name}")
        found += shapes
    return found


def _tell(table: TextIO, cells: Iterable[str]) -> None:
    print(f"| {' | '.join(cells)} |", file=table, flush=True)


def _run_all(names: Iterable[str], ways: Sequence[tuple[str, Division]], table: TextIO) -> list[str]:
    """Writes a row for each shape and way: a transport, and how models are divided. Returns problems, in words."""
    problems: list[str] = []
    for name in names:
        for transport, division in ways:
            with tempfile.TemporaryDirectory() as directory:
                try:
                    with forced_stack(name, transport, Path(directory), division=division) as forced:
                        results = run_checks(forced)
                except Exception:  # a stack that does not start
                    results = {"start": Result(0.0, traceback.format_exc())}
            cells = [f"{each.took_s:.1f} s" if not each.problem else "FAILED" for each in results.values()]
            _tell(table, [SHAPES[name][0], name, transport, str(division), *cells])
            problems += [
                f"{name}, {transport}, {division}, {check}:\n{each.problem}"
                for check, each in results.items()
                if each.problem
            ]
    return problems


def _ranks(text: str) -> Ranks:
    prefill, decode = text.split(":")
    return int(prefill), int(decode)


def main() -> int:
    """Runs what is asked for; prints the table, and the problems at its end."""
    parser = argparse.ArgumentParser(description="odd shapes of all families, with every request handed off")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a shape or a family; none: all")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append", help="may come twice; none: all")
    parser.add_argument("--ranks", type=_ranks, action="append", metavar="P:D", help="may come more than once")
    parser.add_argument("--stages", type=int, action="append", metavar="S", help="may come more than once")
    parser.add_argument("--whole-experts", choices=ROLES, action="append", default=[], help="may come twice")
    arguments = parser.parse_args()
    with os.fdopen(os.dup(1), "w") as table:
        os.dup2(2, 1)  # the processes that follow inherit it
        _tell(table, ["family", "shape", "transport", "ranks", *CHECKS])
        divisions = [
            Division(ranks, stages, frozenset(arguments.whole_experts))
            for ranks, stages in product(arguments.ranks or [(1, 1)], arguments.stages or [1])
        ]
        ways = list(product(arguments.transport or TRANSPORTS, divisions))
        problems = _run_all(_chosen(arguments.names), ways, table)
        print("\n".join(problems), file=table)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
