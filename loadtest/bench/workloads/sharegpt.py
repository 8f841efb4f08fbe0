"""Prompts of a file in ShareGPT's format, with answers as long as those in it.

    [{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}, ...]

or OpenAI's `{"messages": [{"role": "user", "content": "..."}, ...]}` instead; one JSON list, or an object a line.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from loadtest.bench.lengths import Lengths
from loadtest.bench.prompts import Counter
from loadtest.bench.script import Script, Seed, Turn
from loadtest.cannot_run import CannotRun

_LARGEST_BYTES = 4 << 30
_USERS = ("human", "user")
_MODELS = ("gpt", "assistant", "chatgpt", "bing", "bard")

Exchange = tuple[str, str]  # what a user says, and its answer


@dataclass(frozen=True, slots=True)
class ShareGpt:
    """Conversations of a file in random order, and again in another where there are too few.

    num_scripts: None: as many as are asked for.
    """

    file: Path
    conversations: Sequence[list[Exchange]] = field(repr=False)
    num_scripts: int | None
    turns: int
    output: Lengths | None  # None: as long as the answers in the file
    longest: int | None
    pause_s: float
    counter: Counter | None  # None: a word counts as a token

    @property
    def name(self) -> str:
        """See `Workload.name`."""
        return f"{self.file.name}" + (f", {self.turns} turns" if self.turns > 1 else "")

    def scripts(self, seed: Seed) -> Iterator[Script]:
        """See `Workload.scripts`. Raises CannotRun where no conversation fits."""
        found = self.conversations
        random = np.random.default_rng(seed)
        made = unfit = 0
        while True:
            for place in random.permutation(len(found)):
                if made == self.num_scripts:
                    return
                turns = self._turns(found[place], random)
                made, unfit = (made, unfit + 1) if turns is None else (made + 1, 0)
                if turns is not None:
                    yield Script(turns, pause_s=self.pause_s)
            if unfit >= len(found):
                raise CannotRun(f"--dataset {self.file}: no conversation has a prompt and an answer that fit")

    def _turns(self, exchanges: list[Exchange], random: np.random.Generator) -> tuple[Turn, ...] | None:
        """Makes the turns of a conversation; None where it is empty or too long."""
        turns, total = [], 0
        for said, answer in exchanges[: self.turns]:
            length = self._count(answer) if self.output is None else self.output.draw(random)
            if not said.strip() or not length:
                break
            total += self._count(said) + length
            turns.append(Turn(said, length))
        return tuple(turns) if turns and (self.longest is None or total <= self.longest) else None

    def _count(self, text: str) -> int:
        return len(text.split()) if self.counter is None else self.counter.count(text)


def read_conversations(file: Path) -> list[list[Exchange]]:
    """Reads what users said and what was answered. Raises CannotRun for a file that has another format."""
    found = []
    for entry in _entries(file):
        said = entry.get("conversations") or entry.get("messages") if isinstance(entry, dict) else None
        if isinstance(said, list) and (exchanges := list(_exchanges(said))):
            found.append(exchanges)
    if not found:
        raise CannotRun(f"--dataset {file}: it has no conversations of ShareGPT's format")
    return found


def _exchanges(said: list[Any]) -> Iterator[Exchange]:
    lines = [(_text(line, "from", "role"), _text(line, "value", "content")) for line in said]
    for (speaker, prompt), (other, answer) in pairwise(lines):
        if speaker in _USERS and other in _MODELS:
            yield prompt, answer


def _text(line: Any, *names: str) -> str:
    values = [line.get(name) for name in names] if isinstance(line, dict) else []
    return next((value for value in values if isinstance(value, str)), "")


def _entries(file: Path) -> Iterator[Any]:
    try:
        if file.stat().st_size > _LARGEST_BYTES:
            raise CannotRun(f"--dataset {file}: it has more than 4 GiB; cut it")
        raw = file.read_bytes()
        if raw.lstrip()[:1] == b"[":
            yield from orjson.loads(raw)
        else:
            yield from (orjson.loads(line) for line in raw.splitlines() if line.strip())
    except (OSError, ValueError) as error:
        raise CannotRun(f"--dataset {file}: {error}") from error
