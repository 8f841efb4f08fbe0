"""The numbers that a token's experts are chosen by, for kernels of either device. Nothing here needs torch."""

from dataclasses import dataclass
from enum import StrEnum


class Scores(StrEnum):
    """The ways from an expert's logit to the score that a token's choice and weights follow."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax of the chosen"  # logits choose; the softmax is over the chosen experts alone


@dataclass(frozen=True, slots=True)
class RoutingNumbers:
    """The numbers of a layer's router, with the meaning that they have in `Experts`."""

    num_experts: int
    top_k: int
    scores: Scores = Scores.SOFTMAX
    normalized: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    groups_kept: int = 1
    sums_best_two: bool = False
