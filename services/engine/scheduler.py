"""The seam between the engine and a role's policy."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.engine.request import Request
from services.engine.sequences import Sequences


@dataclass(slots=True, eq=False)
class Plan:
    """The next step: which sequences, and how many of their known tokens each computes."""

    slots: np.ndarray  # int64[R]
    counts: np.ndarray  # int32[R], at least 1
    only_decodes: bool = False  # the slots are all those that decode, and no others

    def __len__(self) -> int:
        return len(self.slots)


NOTHING = Plan(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32))


class Scheduler(Protocol):
    """Decides who is admitted, who gives way and what the next step computes. All state is in `sequences`.

    A step may be under way meanwhile. What it samples counts as known tokens.
    """

    def accepts(self, request: Request) -> bool:
        """True when this role can run such a request at all."""

    def admit(self, sequences: Sequences, now: float) -> None:
        """Admits who fits, as `plan` does, without planning: what they wait for can begin before the next step."""

    def plan(self, sequences: Sequences, now: float) -> Plan:
        """Admits, grows and preempts as it sees fit, and returns the next step; an empty one when there is nothing.

        Nobody is preempted while a step is under way: with an empty plan its end comes first.
        """


def take_chunks(sequences: Sequences, slots: np.ndarray, budget: int) -> Plan:
    """Prompt chunks for these slots in this order, as far as `budget` tokens go."""
    batch = sequences.batch
    remaining = batch.length[slots] - batch.computed[slots]
    before = np.cumsum(remaining) - remaining
    counts = np.minimum(remaining, budget - before)
    taken = counts > 0
    return Plan(slots[taken], counts[taken].astype(np.int32))
