"""The requests of a trace, at its times: JSON lines as Mooncake publishes them.

    {"timestamp": 3052, "input_length": 7234, "output_length": 794, "hash_ids": [0, 28, 29, ...]}

A hash id names a block of 512 tokens of the prompt, and equal ids are equal blocks: their tokens are random, and those
of an id are the same in each prompt. The last block may be shorter. Tokens beyond the blocks are a request's own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import orjson

from loadtest.bench.prompts import Prompt, Prompts
from loadtest.bench.script import Script, Seed, Turn
from loadtest.cannot_run import CannotRun

BLOCK_TOKENS = 512
_OWN = 1 << 40  # beside the blocks' seeds, which are below


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a trace. at_s: when it came, in seconds after the first one."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests of a file in the order of their times. left_out: how many of the file were too long."""

    file: str
    lines: tuple[Line, ...]
    left_out: int
    block_tokens: int
    speed: float
    prompts: Prompts

    @property
    def name(self) -> str:
        """See `Workload.name`."""
        faster = "" if self.speed == 1 else f", {self.speed:g} times as fast"
        shorter = f", {self.left_out} longer requests left out" if self.left_out else ""
        return f"{self.file}{faster}{shorter}"

    @property
    def num_scripts(self) -> int | None:
        """See `Workload.num_scripts`."""
        return len(self.lines)

    def scripts(self, seed: Seed) -> Iterator[Script]:
        """See `Workload.scripts`."""
        base = [seed] if isinstance(seed, int) else list(seed)
        for number, line in enumerate(self.lines):
            prompt = self._prompt(line, base, number)
            yield Script((Turn(prompt, line.output_tokens),), at_s=line.at_s / self.speed)

    def _prompt(self, line: Line, base: list[int], number: int) -> Prompt:
        parts, rest = [], line.input_tokens
        for hash_id in line.hash_ids[: -(-rest // self.block_tokens)]:
            length = min(rest, self.block_tokens)  # a shorter block is how the whole one begins: draws are in order
            parts.append(self.prompts.make(np.random.default_rng([*base, hash_id]), length))
            rest -= length
        if rest:
            parts.append(self.prompts.make(np.random.default_rng([*base, _OWN + number]), rest))
        return self.prompts.join(*parts)


def read_trace(file: Path, requests: int | None, longest: int | None) -> tuple[tuple[Line, ...], int]:
    """Reads the first requests of a file, and counts those that are longer. Raises CannotRun, which names the line.

    requests: None: all. longest: in tokens, prompt and answer together; None: any.
    """
    found = _lines(file)
    first_s = min(line.at_s for line in found)
    fitting = [replace(line, at_s=line.at_s - first_s) for line in found if longest is None or line.tokens <= longest]
    if not fitting:
        raise CannotRun(f"--trace {file}: each of its requests is longer than --longest {longest}")
    fitting.sort(key=lambda line: line.at_s)
    return tuple(fitting[:requests]), len(found) - len(fitting)


def _lines(file: Path) -> list[Line]:
    found = []
    try:
        with file.open("rb") as lines:
            for number, raw in enumerate(lines, 1):
                if raw.strip():
                    found.append(_line(raw, f"--trace {file}, line {number}"))
    except OSError as error:
        raise CannotRun(f"--trace {file}: {error}") from error
    if not found:
        raise CannotRun(f"--trace {file}: it has no requests")
    return found


def _line(raw: bytes, where: str) -> Line:
    try:
        entry = orjson.loads(raw)
        line = Line(
            float(entry["timestamp"]) / 1e3,
            int(entry["input_length"]),
            int(entry["output_length"]),
            tuple(map(int, entry.get("hash_ids") or ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotRun(f"{where}: no timestamp, input_length and output_length: {error!r}") from error
    if (
        not np.isfinite(line.at_s)
        or min(line.input_tokens, line.output_tokens) < 1
        or min(line.hash_ids, default=0) < 0
    ):
        raise CannotRun(f"{where}: times are finite, lengths at least 1, and hash ids not negative")
    return line
