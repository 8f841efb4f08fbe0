"""Conversations of random contents: each turn has what was said and answered before it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from loadtest.bench.lengths import Lengths
from loadtest.bench.prompts import Prompts
from loadtest.bench.script import Script, Seed, Turn


@dataclass(frozen=True, slots=True)
class Conversations:
    """`requests` conversations of so many turns each; None: as many as are asked for."""

    requests: int | None
    turns: int
    input: Lengths
    output: Lengths
    pause_s: float
    prompts: Prompts

    @property
    def name(self) -> str:
        """See `Workload.name`."""
        return f"conversations of {self.turns} turns, {self.input} / {self.output} tokens"

    @property
    def num_scripts(self) -> int | None:
        """See `Workload.num_scripts`."""
        return self.requests

    def scripts(self, seed: Seed) -> Iterator[Script]:
        """See `Workload.scripts`."""
        random = np.random.default_rng(seed)
        number = 0
        while self.requests is None or number < self.requests:
            turns = [self._turn(random) for _ in range(self.turns)]
            yield Script(tuple(turns), pause_s=self.pause_s)
            number += 1

    def _turn(self, random: np.random.Generator) -> Turn:
        return Turn(self.prompts.make(random, self.input.draw(random)), self.output.draw(random))
