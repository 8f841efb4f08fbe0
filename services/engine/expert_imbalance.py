"""The imbalance between the experts of a model: tokens of a layer's busiest expert over the mean of its experts; and
between ranks that have whole experts: pairs of the busiest rank over the mean of the ranks, for which the others wait.

1: all experts of a layer get the same; their number over `top_k`: all tokens choose the same ones. What the busiest
expert gets is what a step waits for where each expert is computed by itself, and where experts lie on several devices
(Lepikhin et al. 2020, arXiv 2006.16668, section 2.2).

Runners count pairs of a token and an expert as they sort them, and tell them with a step now and then. The figures are
of the pairs between two such steps.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_EVERY_S = 5.0  # between steps that tell their counts
_WINDOW_S = 60.0  # the figures are of at least so long, once the worker is so old


@dataclass(frozen=True, slots=True)
class Imbalance:
    """The imbalance of a model's layers, over the same time."""

    worst: float  # of the layer where it is highest
    mean: float  # over all layers


def pairs_of_ranks(pairs: np.ndarray, experts: Sequence[range]) -> np.ndarray:
    """Returns the pairs of each rank, int64[layers, ranks], whose experts, some of all, got these pairs, int64[layers,
    experts].
    """
    return np.stack([pairs[:, own.start : own.stop].sum(axis=1) for own in experts], axis=1)


def imbalance_of(pairs: np.ndarray) -> Imbalance | None:
    """Returns the imbalance of layers whose experts, or ranks, got these pairs, int64[layers, experts or ranks]; None:
    there are none.
    """
    pairs = pairs[pairs.any(axis=1)]  # the last layer gets only tokens whose successors are wanted, maybe none
    if not len(pairs):
        return None
    of_layers = pairs.max(axis=1) * pairs.shape[1] / pairs.sum(axis=1)
    return Imbalance(float(of_layers.max()), float(of_layers.mean()))


class ExpertImbalance:
    """The imbalance over the last minute. While nothing is computed, it stays what it was."""

    def __init__(self, experts_of_ranks: Sequence[range] = ()) -> None:
        """experts_of_ranks: those of each rank that has whole experts; none: no rank has."""
        self.latest: Imbalance | None = None  # between experts; None: not known so far
        self.latest_of_ranks: Imbalance | None = None  # between ranks; None: no rank has whole experts, or not known
        self._experts_of_ranks = experts_of_ranks
        self._asked_at = -math.inf
        self._told: deque[tuple[float, np.ndarray]] = deque()  # when, and all pairs until then

    def asks(self, now: float) -> bool:
        """Returns True if the step that is launched at this time, in seconds, should tell its counts, and notes that it
        does. The counts of steps come in the order in which these were asked.
        """
        if now - self._asked_at < _EVERY_S:
            return False
        self._asked_at = now
        return True

    def note(self, pairs: np.ndarray) -> None:
        """Takes the counts of the step that was asked last: int64[layers, experts], all pairs until it was complete."""
        self._told.append((self._asked_at, pairs))
        while len(self._told) > 2 and self._told[1][0] <= self._asked_at - _WINDOW_S:
            self._told.popleft()
        computed = pairs - self._told[0][1]
        self.latest = imbalance_of(computed) or self.latest
        if self._experts_of_ranks:
            of_ranks = imbalance_of(pairs_of_ranks(computed, self._experts_of_ranks))
            self.latest_of_ranks = of_ranks or self.latest_of_ranks
