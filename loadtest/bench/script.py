"""Scripts, which are requests one after the other, and workloads, which make them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from loadtest.bench.prompts import Prompt

Seed = int | Sequence[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `prompt`: in a chat what the user says; `fields`: further ones of its body."""

    prompt: Prompt
    output_tokens: int
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Script:
    """A request, or a conversation of several: each has the answers before it.

    at_s: when a trace has it begin, in seconds; None: the arrivals say it. pause_s: between an answer and what follows.
    """

    turns: tuple[Turn, ...]
    at_s: float | None = None
    pause_s: float = 0.0


def numbers(num_scripts: int | None) -> Iterable[int]:
    """Counts scripts from 0 on, without end where there is no number of them."""
    return count() if num_scripts is None else range(num_scripts)


class Workload(Protocol):
    """A kind of requests."""

    @property
    def name(self) -> str:
        """The workload in a few words, with its lengths, for reports."""

    @property
    def num_scripts(self) -> int | None:
        """The number of scripts; None: as many as are asked for."""

    def scripts(self, seed: Seed) -> Iterator[Script]:
        """Makes the scripts; equal seeds give equal ones."""
