"""Requests of random contents, of one length or of many; groups of them may begin alike."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from loadtest.bench.lengths import Lengths
from loadtest.bench.prompts import Prompts, TokenIds
from loadtest.bench.script import Script, Seed, Turn, numbers


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Prompts of `prefix_tokens`, the same in all of a group, and `input` of their own.

    num_scripts: None: as many as are asked for. Requests of the groups take turns.
    """

    num_scripts: int | None
    input: Lengths
    output: Lengths
    prefix_tokens: int = 0
    groups: int = 1
    prompts: Prompts = field(default_factory=TokenIds)

    @property
    def name(self) -> str:
        """See `Workload.name`."""
        prefix = f"{self.groups} × {self.prefix_tokens} + " if self.prefix_tokens else ""
        return f"{prefix}{self.input} / {self.output} tokens"

    def scripts(self, seed: Seed) -> Iterator[Script]:
        """See `Workload.scripts`."""
        of_prefixes, of_requests = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(2))
        prefixes = [self.prompts.make(of_prefixes, self.prefix_tokens) for _ in range(self.groups)]
        for number in numbers(self.num_scripts):
            prompt = self.prompts.make(of_requests, self.input.draw(of_requests))
            if self.prefix_tokens:
                prompt = self.prompts.join(prefixes[number % self.groups], prompt)
            yield Script((Turn(prompt, self.output.draw(of_requests)),))


REQUESTS = 64  # where nobody says how many
NAMED = {
    "decode": RandomLengths(REQUESTS, Lengths.fixed(48), Lengths.fixed(128)),
    "prefill": RandomLengths(REQUESTS, Lengths.fixed(462), Lengths.fixed(16)),
}
