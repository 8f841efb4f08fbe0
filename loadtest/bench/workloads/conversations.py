"""Conversations of random contents: each turn has what was said and answered before it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from loadtest.bench.lengths import Lengths
from loadtest.bench.prompts import Prompts
from loadtest.bench.script import Script, Seed, Turn, numbers


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations of so many turns each. num_scripts: None: as many as are asked for."""

    num_scripts: int | None
    turns: int
    input: Lengths
    output: Lengths
    pause_s: float
    prompts: Prompts

    @property
    def name(self) -> str:
        """See `Workload.name`."""
        return f"conversations of {self.turns} turns, {self.input} / {self.output} tokens"

    def scripts(self, seed: Seed) -> Iterator[Script]:
        """See `Workload.scripts`."""
        random = np.random.default_rng(seed)
        for _ in numbers(self.num_scripts):
            turns = [self._turn(random) for _ in range(self.turns)]
            yield Script(tuple(turns), pause_s=self.pause_s)

    def _turn(self, random: np.random.Generator) -> Turn:
        return Turn(self.prompts.make(random, self.input.draw(random)), self.output.draw(random))
