"""The choice of each token's experts in Triton. A program has one token; all of it is in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.kernels.routing_numbers import RoutingNumbers, Scores

_LEAST_SUM: tl.constexpr = tl.constexpr(1e-20)  # keeps weights finite where all scores are 0
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = range(3)


_SCORINGS = {Scores.SOFTMAX: _SOFTMAX, Scores.SIGMOID: _SIGMOID, Scores.SOFTMAX_OF_CHOSEN: _SOFTMAX_OF_CHOSEN}


@triton.jit
def _comparable(x: tl.tensor) -> tl.tensor:
    """Returns x with -inf for NaN, which has no place among numbers."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def route_kernel(
    logits: tl.tensor,
    correction: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    stride: tl.tensor,
    SCALING: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALIZED: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    SUMS_BEST_TWO: tl.constexpr,
) -> None:
    """Chooses the experts of one token. SLOTS, GROUPS and SIZE are the powers of two that hold TOP_K, NUM_GROUPS and
    GROUP_SIZE.
    """
    token = tl.program_id(0).to(tl.int64)
    groups, places = tl.arange(0, GROUPS)[:, None], tl.arange(0, SIZE)[None, :]
    is_expert = (groups < NUM_GROUPS) & (places < GROUP_SIZE)
    ids = groups * GROUP_SIZE + places
    logit = tl.load(logits + token * stride + ids, mask=is_expert, other=float("-inf")).to(tl.float32)
    scores = logit
    if SCORING == 0:
        powers = tl.exp(logit - tl.max(tl.max(_comparable(logit), 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    if SCORING == 1:
        scores = 1 / (1 + tl.exp(-logit))
    ranked = scores
    if correction is not None:
        ranked += tl.load(correction + ids, mask=is_expert, other=0).to(tl.float32)
    ranked = tl.where(is_expert, _comparable(ranked), float("-inf"))
    if GROUPS_KEPT < NUM_GROUPS:
        best = tl.max(ranked, 1)
        if SUMS_BEST_TWO:
            others = tl.where(places == tl.argmax(ranked, 1)[:, None], float("-inf"), ranked)
            best += tl.max(others, 1)
        rows = tl.arange(0, GROUPS)
        best = tl.where(rows < NUM_GROUPS, best, float("-inf"))
        kept = rows < 0
        for _ in range(GROUPS_KEPT):
            group = tl.argmax(best, 0)
            kept = kept | (rows == group)
            best = tl.where(rows == group, float("-inf"), best)
        ranked = tl.where(kept[:, None], ranked, float("-inf"))
    flat = tl.reshape(ranked, (GROUPS * SIZE,))
    flat_scores, flat_ids = tl.reshape(scores, (GROUPS * SIZE,)), tl.reshape(ids, (GROUPS * SIZE,))
    at, slots = tl.arange(0, GROUPS * SIZE), tl.arange(0, SLOTS)
    own_ids = tl.zeros((SLOTS,), dtype=tl.int32)
    own = tl.full((SLOTS,), float("-inf"), dtype=tl.float32)
    for slot in range(TOP_K):
        is_best = at == tl.argmax(flat, 0)
        own_ids = tl.where(slots == slot, tl.sum(tl.where(is_best, flat_ids, 0), 0), own_ids)
        own = tl.where(slots == slot, tl.sum(tl.where(is_best, flat_scores, 0.0), 0), own)
        flat = tl.where(is_best, float("-inf"), flat)
    in_use = slots < TOP_K
    if SCORING == 2:
        own = tl.exp(own - tl.max(_comparable(own), 0))
        own = own / tl.sum(own, 0)
    own = tl.where(in_use, own, 0.0)
    if NORMALIZED:
        own = own / (tl.sum(own, 0) + _LEAST_SUM)
    tl.store(chosen + token * TOP_K + slots, own_ids, mask=in_use)
    tl.store(weights + token * TOP_K + slots, own * SCALING, mask=in_use)


def route(logits: Tensor, numbers: RoutingNumbers, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns each token's experts, int32[T, top_k], the best first, and their weights, float32[T, top_k].

    logits: [T, num_experts], whose rows may lie apart. correction: [num_experts], added to scores for the choice alone.
    """
    num_tokens, of_group = len(logits), numbers.num_experts // numbers.num_groups
    chosen = torch.empty((num_tokens, numbers.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, numbers.top_k), dtype=torch.float32, device=logits.device)
    route_kernel[(num_tokens,)](
        logits,
        correction,
        chosen,
        weights,
        logits.stride(0),
        SCALING=numbers.scaling,
        SCORING=_SCORINGS[numbers.scores],
        NORMALIZED=numbers.normalized,
        TOP_K=numbers.top_k,
        SLOTS=triton.next_power_of_2(numbers.top_k),
        NUM_GROUPS=numbers.num_groups,
        GROUPS=triton.next_power_of_2(numbers.num_groups),
        GROUPS_KEPT=numbers.groups_kept,
        GROUP_SIZE=of_group,
        SIZE=triton.next_power_of_2(of_group),
        SUMS_BEST_TWO=numbers.sums_best_two,
        num_warps=1 if numbers.num_experts <= 64 else 4,
    )
    return chosen, weights
