"""Workloads that Baton and its peers are compared by. A workload is named by its shape, in tokens:

48/128               prompts of 48, answers of 128, all requests at once
48/128 single        those prompts and answers, one request at a time
16x48/128            16 of them, where the shape alone is sent in larger numbers
4096+32/16 cold      prompts of 4096 that all share and 32 of their own, answers of 16
4096+32/16 warm      those prompts a second time
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from loadtest.bench.lengths import Lengths
from loadtest.bench.workloads.random_lengths import RandomLengths


class Figure(StrEnum):
    """The figure by which a workload is compared."""

    TOKENS_PER_S = "output tok/s"
    REQUESTS_PER_S = "req/s"
    TTFT_MS = "TTFT ms"
    TPOT_MS = "TPOT ms"

    @property
    def higher_is_better(self) -> bool:
        """True for rates, false for times."""
        return self in (Figure.TOKENS_PER_S, Figure.REQUESTS_PER_S)


def shape(requests: int, input_tokens: int, output_tokens: int, shared_tokens: int = 0) -> RandomLengths:
    """Requests of one length, whose prompts begin with so many tokens that all share."""
    return RandomLengths(requests, Lengths.fixed(input_tokens), Lengths.fixed(output_tokens), shared_tokens)


@dataclass(frozen=True, slots=True)
class Compared:
    """A workload, the way in which it is sent, and the figure by which it is compared."""

    load: RandomLengths
    figure: Figure
    single: bool = False  # one request at a time
    twice: bool = False  # a second run with the same prompts finds them cached
    counted: bool = False  # the name says how many requests there are

    @property
    def name(self) -> str:
        """The workload's shape, in tokens."""
        load = self.load
        shared = f"{load.prefix_tokens}+" if load.prefix_tokens else ""
        count = f"{load.num_scripts}x" if self.counted else ""
        return f"{count}{shared}{load.input}/{load.output}" + (" single" if self.single else "")

    @property
    def run_names(self) -> tuple[str, ...]:
        """The names of the workload's runs, in order."""
        return (f"{self.name} cold", f"{self.name} warm") if self.twice else (self.name,)

    @property
    def requests(self) -> int:
        """The number of requests."""
        assert self.load.num_scripts is not None
        return self.load.num_scripts

    @property
    def concurrency(self) -> int:
        """Requests at a time."""
        return 1 if self.single else self.requests

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers together."""
        return self.requests * self.load.output.longest


ALL = (
    Compared(shape(64, 48, 128), Figure.TOKENS_PER_S),
    Compared(shape(64, 462, 16), Figure.REQUESTS_PER_S),
    Compared(shape(32, 32, 16, shared_tokens=4096), Figure.REQUESTS_PER_S, twice=True),
    Compared(shape(64, 202, 179), Figure.TOKENS_PER_S),
    Compared(shape(80, 5, 10, shared_tokens=1195), Figure.REQUESTS_PER_S, twice=True),
    Compared(shape(64, 462, 256), Figure.TOKENS_PER_S),
    Compared(shape(64, 48, 500), Figure.TOKENS_PER_S),
    Compared(shape(20, 48, 128), Figure.TPOT_MS, single=True),
    Compared(shape(4, 4096, 8), Figure.TTFT_MS, single=True),
    Compared(shape(16, 48, 128), Figure.TOKENS_PER_S, counted=True),
    Compared(shape(16, 462, 16), Figure.REQUESTS_PER_S, counted=True),
)
QUICK = ALL[:3]

# Before anything is measured, for every server alike: code is compiled and threads are started by then.
WARM_UP = (shape(16, 300, 16), shape(2, 4096, 8))

LONGEST = max(
    load.prefix_tokens + load.input.longest + load.output.longest for load in (*(c.load for c in ALL), *WARM_UP)
)


def chosen(names: Sequence[str]) -> tuple[Compared, ...]:
    """Finds workloads by name. Raises ValueError for a name that there is not."""
    by_name = {workload.name: workload for workload in ALL}
    if unknown := [name for name in names if name not in by_name]:
        raise ValueError(f"no workload {unknown[0]!r}; there are {', '.join(by_name)}")
    return tuple(by_name[name] for name in names)
