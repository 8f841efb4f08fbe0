"""The seam between the engine and a role's policy."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.engine.sequences.request import Request
from services.engine.sequences.sequences import Sequences


@dataclass(slots=True, eq=False)
class StepPlan:
    """The sequences of the next step, and how many of their known tokens each computes.

    A decoding sequence may compute more: drafts, which stand in the batch's `tokens` after its length. With them it has
    at most its greatest length of tokens, and a block for each; no step is under way.
    """

    slots: np.ndarray  # int64[R]
    counts: np.ndarray  # int32[R], at least 1
    only_decodes: bool = False  # the slots are all those that decode, and no others

    def __len__(self) -> int:
        return len(self.slots)


NOTHING = StepPlan(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32))


class Scheduler(Protocol):
    """Decides which requests are admitted and preempted, and what the next step computes. All state is in `sequences`.

    A step may be under way meanwhile. The tokens that it samples count as known.
    """

    def accepts(self, request: Request) -> bool:
        """Returns whether this role can run such a request at all."""

    def admit(self, sequences: Sequences, now: float) -> None:
        """Admits requests that fit, as `plan` does, without planning: their reads can begin before the next step."""

    def plan(self, sequences: Sequences, now: float) -> StepPlan:
        """Admits, grows and preempts, and returns the next step; an empty plan when there is nothing to compute.

        No sequence is preempted while a step is under way: an empty plan has the engine collect that step first.
        """


def take_chunks(sequences: Sequences, slots: np.ndarray, budget: int) -> StepPlan:
    """Plans prompt chunks for these int64[n] slots, in this order, until `budget` tokens are used up.

    Where prompts must be whole in a step, those that fit into the budget are taken, and the first in any case.
    """
    batch = sequences.batch
    remaining = batch.length[slots] - batch.computed[slots]
    ends = np.cumsum(remaining)
    if sequences.whole_prompts:
        whole = ends <= budget
        whole[:1] = True
        return StepPlan(slots[whole], remaining[whole].astype(np.int32))
    before = ends - remaining
    counts = np.minimum(remaining, budget - before)
    taken = counts > 0
    return StepPlan(slots[taken], counts[taken].astype(np.int32))
