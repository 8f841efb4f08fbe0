"""The choice of each token's experts, from the logits of a layer's router.

All of it is in float32. Of experts with equal scores, those with lower numbers are chosen.
"""

import torch
from torch import Tensor

from services.engine.kernels.routing_numbers import Scores
from services.engine.models.experts_config import Experts

_LEAST_SUM = 1e-20  # keeps weights finite where all scores are 0


def route(logits: Tensor, experts: Experts, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns each token's experts, int64[T, top_k], the best first, and their weights, float32[T, top_k].

    logits: [T, num_experts]. correction: float32[num_experts], added to scores for the choice alone, if `corrected`.
    """
    logits = logits.to(torch.float32)
    scores = _scores(logits, experts.scores)
    # A softmax keeps the order of its logits, but for what is rounded to equal numbers.
    ranked = scores if experts.scores is Scores.SIGMOID else logits
    if correction is not None:
        ranked = scores + correction
    if experts.groups_kept < experts.num_groups:
        ranked = _in_best_groups(ranked, experts)
    chosen = _best(ranked, experts.top_k)
    weights = scores.gather(1, chosen)
    if experts.scores is Scores.SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(dim=1)
    if experts.normalized:
        weights = weights / (weights.sum(dim=1, keepdim=True) + _LEAST_SUM)
    return chosen, weights * experts.scaling


def _scores(logits: Tensor, kind: Scores) -> Tensor:
    if kind is Scores.SOFTMAX:
        return logits.softmax(dim=1)
    return logits.sigmoid() if kind is Scores.SIGMOID else logits


def _in_best_groups(ranked: Tensor, experts: Experts) -> Tensor:
    """Returns the scores with -inf for experts in groups that a token does not keep (DeepSeek-AI 2024, arXiv
    2405.04434, section 2.2.2, and arXiv 2412.19437, section 2.1.2).
    """
    groups = ranked.unflatten(1, (experts.num_groups, -1))
    highest = groups.topk(2 if experts.sums_best_two else 1, dim=2).values.sum(dim=2)
    kept = torch.zeros_like(highest, dtype=torch.bool).scatter_(1, _best(highest, experts.groups_kept), True)
    return groups.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)


def _best(scores: Tensor, count: int) -> Tensor:
    """Returns the places of the highest numbers of each row, the highest first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
