"""Sampling on the CPU: computes tokens from logits.

A row's token depends on its own logits, parameters, seed and position, never on its neighbours in the batch. Its
randomness is one uniform number, a pure function of (seed, position), put through the inverse of the filtered
distribution's cumulative sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.engine.kernels.torch_operations import TorchOperations
from services.engine.runner.base import (
    NO_ROWS,
    NOT_FINITE,
    LogitEdits,
    NamedLogprobs,
    SamplingBatch,
    StepLogprobs,
    StepOutput,
    TokenMasks,
    common_width,
    wide_rows,
)
from services.engine.runner.ranking import likeliest_of, ranks

Mask = Callable[[Tensor, Tensor, Tensor], None]
_BY_TORCH = TorchOperations()

_BITS = {  # dtypes of the same bits, and the bits of infinity
    torch.float32: (torch.int32, np.uint32, 0x7F800000),
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80),
    torch.float16: (torch.int16, np.uint16, 0x7C00),
}

NUM_CANDIDATES = 1024  # a filtered row is sorted whole only if its filters reach beyond so many best tokens
MIN_TEMPERATURE = 1e-5  # lower temperatures count as this one: apart from ties, one token has all the weight


def sample(logits: Tensor, batch: SamplingBatch, mask: Mask = _BY_TORCH.mask) -> StepOutput:
    """Samples one token for each row of `logits` (floating-point [N, vocab], on the CPU), which it may overwrite.

    NOT_FINITE stands for a token where the row's logits are not all finite. mask: see `HostOperations.mask`.
    """
    if batch.only_likeliest and batch.edits is None:
        chosen = likeliest(logits)
        output, strange = StepOutput(chosen, None), find_not_finite(logits, chosen)
    else:
        strange = find_not_finite(logits)  # before anything is edited
        output = _sample(logits, batch, mask)
    output.token_ids[strange] = NOT_FINITE
    return output


def find_not_finite(logits: Tensor, highest: np.ndarray | None = None) -> np.ndarray:
    """Returns the rows of logits (floating-point [N, vocab], on the CPU) that have NaN or infinities, int64[M].

    highest: what `likeliest` returns, where it is known; it halves the work. By their bits, numbers above 0 are in the
    order of integers, and those below 0 in that of unsigned integers, backwards; infinities come last, NaN behind them.
    numpy finds the largest integers fast: of 64 rows of 8,192 bfloat16 in 0.05 ms.
    """
    signed, unsigned, infinity = _BITS[logits.dtype]
    above = logits.view(signed).numpy()
    below, minus_infinity = above.view(unsigned), infinity | 1 << (8 * logits.dtype.itemsize - 1)
    if not above.size:
        return NO_ROWS
    tops = above if highest is None else above[np.arange(len(above)), highest]  # of NaN, whatever its sign, the first
    if _largest(tops) < infinity and _largest(below) < minus_infinity:
        return NO_ROWS
    return np.flatnonzero((above.max(axis=1) >= infinity) | (below.max(axis=1) >= minus_infinity))


def _largest(bits: np.ndarray) -> int:
    flat = bits.reshape(-1)
    return int(flat[flat.argmax()])  # of few numbers, `max` takes three times as long


def _sample(logits: Tensor, batch: SamplingBatch, mask: Mask) -> StepOutput:
    if batch.only_likeliest:
        return StepOutput(_likeliest_allowed(logits, batch, mask), None)
    logits = logits.to(torch.float32)
    raw = logits
    if batch.edits is not None:
        raw = logits.clone() if batch.any_logprobs else logits
        _edit(logits, batch.edits)
        if batch.edits.masks is not None:
            _mask(logits, batch.edits.masks, mask)
    chosen = torch.from_numpy(logits.numpy().argmax(axis=-1))  # torch's own takes ten times as long on a CPU
    if not batch.all_greedy:
        drawn = np.flatnonzero((batch.temperature > 0) & (batch.top_k != 1))  # the best one is the likeliest
        rows = torch.from_numpy(drawn)
        chosen[rows] = _draw(logits, batch, drawn, chosen[rows])
    logprobs = _logprobs(raw, chosen, batch.num_logprobs, batch.named) if batch.any_logprobs else None
    return StepOutput(chosen.to(torch.int32).numpy(), logprobs)


def _likeliest_allowed(logits: Tensor, batch: SamplingBatch, mask: Mask) -> np.ndarray:
    """Returns the likeliest token of each row that it may choose, int32[N]."""
    masks = None if batch.edits is None else batch.edits.masks
    if masks is None:
        return likeliest(logits)
    if masks.settle is None:
        _mask(logits, masks, mask)
        return likeliest(logits)
    chosen = likeliest(logits)
    settled = chosen[masks.rows]
    refused = masks.settle(settled)
    chosen[masks.rows] = settled
    if refused is not None:
        _mask(logits, refused, mask)
        chosen[refused.rows] = likeliest(logits[torch.from_numpy(refused.rows)])
    return chosen


def likeliest(logits: Tensor) -> np.ndarray:
    """Returns the first of each row's highest logits (floating-point [N, vocab], on the CPU), int32[N].

    Numbers above 0 are in the order of their bits, and numpy searches integers fast: 64 rows of 8,192 bfloat16 take
    0.02 ms, by way of float32 0.2, in torch 0.9.
    """
    if logits.dtype != torch.bfloat16:
        chosen: np.ndarray = logits.to(torch.float32).numpy().argmax(axis=-1)
        return chosen.astype(np.int32)
    bits = logits.view(torch.int16).numpy()
    chosen = bits.argmax(axis=-1)
    rows = np.flatnonzero(bits[np.arange(len(bits)), chosen] <= 0)
    if len(rows):  # negative numbers are in the opposite order
        chosen[rows] = logits[torch.from_numpy(rows)].to(torch.float32).numpy().argmax(axis=-1)
    return chosen.astype(np.int32)


def score(logits: Tensor, tokens: np.ndarray, width: int, wide: Sequence[tuple[int, int]] = ()) -> StepLogprobs:
    """Returns log-probabilities of int32[N] tokens and `width` alternatives under softmax of [N, vocab] logits, and the
    tokens' ranks.

    A token's own is NaN where logits are not all finite. wide: see `wide_rows`.
    """
    chosen, widths = torch.from_numpy(tokens.astype(np.int64)), np.full(len(tokens), width, dtype=np.int32)
    found = _logprobs(logits.to(torch.float32), chosen, widths)
    found.sampled[find_not_finite(logits)] = np.nan
    found.ranks = ranks(logits, chosen).numpy()
    found.wide = _wide(logits, wide)
    return found


def _wide(logits: Tensor, rows: Sequence[tuple[int, int]]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Returns the alternatives of `wide_rows`, one row after the other: each takes some copies of its logits."""
    found = ((row, likeliest_of(logits[row], number)) for row, number in rows)
    return {row: (ids.numpy().copy(), values.numpy().copy()) for row, (ids, values) in found}


def _edit(logits: Tensor, edits: LogitEdits) -> None:
    """Applies biases and penalties, in place."""
    biased = torch.from_numpy(edits.bias_rows), torch.from_numpy(edits.bias_tokens)
    logits.index_put_(biased, torch.from_numpy(edits.bias), accumulate=True)
    rows, tokens = torch.from_numpy(edits.count_rows), torch.from_numpy(edits.count_tokens)
    counts, values = torch.from_numpy(edits.counts), logits[rows, tokens]
    repetition = torch.from_numpy(edits.repetition)[rows]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= torch.from_numpy(edits.frequency)[rows] * counts
    values -= torch.from_numpy(edits.presence)[rows] * (counts > 0)
    logits[rows, tokens] = values


def _mask(logits: Tensor, masks: TokenMasks, mask: Mask) -> None:
    mask(logits, torch.from_numpy(masks.rows), torch.from_numpy(masks.bits().view(np.int32)))


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns one number in [0, 1) for each (seed, position): uint64[N], int64[N] -> float32[N], multiples of 2**-24.

    SplitMix64 (Steele, Lea and Flood 2014): the seed is mixed to the start of a stream, the position picks its n-th
    output.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(seeds + step) + step * (positions.astype(np.uint64) + np.uint64(1))
    drawn: np.ndarray = (_mix(state) >> np.uint64(40)).astype(np.float32)
    return drawn * np.float32(2.0**-24)


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def _draw(logits: Tensor, batch: SamplingBatch, rows: np.ndarray, likeliest: Tensor) -> Tensor:
    """Draws tokens, int64[M], for the M rows that have a temperature. likeliest: int64[M], their likeliest tokens.

    As in vLLM, min_p is a share of the likeliest of all tokens, top_k counts what min_p leaves, and top_p is a share of
    the weight that both leave.
    """
    temperature = torch.from_numpy(np.maximum(batch.temperature[rows], MIN_TEMPERATURE).astype(np.float32))[:, None]
    warm = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows)]
    weights = (warm - warm.amax(dim=-1, keepdim=True)).div_(temperature).exp_()  # the likeliest token weighs 1
    uniform = torch.from_numpy(uniforms(batch.seed[rows], batch.position[rows]))
    top_k, top_p, min_p = batch.top_k[rows], batch.top_p[rows], torch.from_numpy(batch.min_p[rows].astype(np.float32))
    if min_p.any():
        weights.masked_fill_(weights < min_p[:, None], 0)
    sorting = ((top_k > 0) & (top_k < weights.shape[1])) | (top_p < 1)
    chosen = torch.empty(len(rows), dtype=torch.int64)
    plain, filtered = torch.from_numpy(np.flatnonzero(~sorting)), torch.from_numpy(np.flatnonzero(sorting))
    if len(plain):
        chosen[plain] = _invert(weights[plain] if len(filtered) else weights, uniform[plain])
    if len(filtered):
        k = torch.from_numpy(np.where(top_k[sorting] > 0, top_k[sorting], weights.shape[1]).astype(np.int64))
        filters = _Filters(k, torch.from_numpy(top_p[sorting].astype(np.float32)), likeliest[filtered])
        chosen[filtered] = _draw_filtered(weights[filtered], filters, uniform[filtered])
    return chosen


@dataclass(frozen=True, slots=True)
class _Filters:
    """The filters of M rows, and the token of a row in which they leave one alone. Weights of others are 0 already
    where min_p excludes them.
    """

    top_k: Tensor  # int64[M], the vocabulary's size at most
    top_p: Tensor  # float32[M]
    likeliest: Tensor  # int64[M]

    def of(self, rows: Tensor) -> "_Filters":
        """Returns the filters of some rows, int64[N]."""
        return _Filters(self.top_k[rows], self.top_p[rows], self.likeliest[rows])


def _draw_filtered(weights: Tensor, filters: _Filters, uniform: Tensor) -> Tensor:
    """Draws tokens for rows with top_k or top_p. Reads the best candidates first, and all tokens only for rows that
    need it.
    """
    vocab = weights.shape[1]
    total = weights.sum(dim=-1)
    best, ids = weights.topk(min(NUM_CANDIDATES, vocab), dim=-1)
    reach_top_p = best.sum(dim=-1) >= filters.top_p * total
    enough = (filters.top_k <= best.shape[1]) | ((filters.top_k >= vocab) & reach_top_p)
    chosen = _draw_sorted(best, ids, total, vocab, filters, uniform)
    rest = (~enough).nonzero().squeeze(1)
    if len(rest):
        best, ids = weights[rest].sort(dim=-1, descending=True, stable=True)
        chosen[rest] = _draw_sorted(best, ids, total[rest], vocab, filters.of(rest), uniform[rest])
    return chosen


def _draw_sorted(best: Tensor, ids: Tensor, total: Tensor, vocab: int, filters: _Filters, uniform: Tensor) -> Tensor:
    """Draws tokens from weights in falling order (`best`, of the tokens `ids`); all `vocab` weights add up
    to `total`.

    Equal weights come in any order. Where one token is left, that is the likeliest, as without a temperature.
    """
    sums = best.to(torch.float64).cumsum(dim=-1)
    last = (filters.top_k - 1).clamp_(max=best.shape[1] - 1)[:, None]
    after_top_k = torch.where(filters.top_k < vocab, sums.gather(1, last).squeeze(1), total.to(torch.float64))
    # The best tokens up to the one with which their weights reach top_p.
    keep = (sums - best) < (filters.top_p * after_top_k)[:, None]
    keep &= torch.arange(best.shape[1]) < filters.top_k[:, None]
    keep[:, 0] = True
    kept = best.masked_fill(~keep, 0)
    chosen = ids.gather(1, _invert(kept, uniform)[:, None]).squeeze(1)
    return torch.where(kept[:, 1:2].sum(dim=-1) > 0, chosen, filters.likeliest)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Returns the index at which each row's cumulative weight first exceeds `uniform` (float32[M]) of the row's total.

    That index has a weight above zero, since the target lies below the total.
    """
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1]
    target = torch.minimum(uniform * total, total.nextafter(torch.zeros(())))
    return torch.searchsorted(sums, target[:, None], right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)


def _logprobs(logits: Tensor, chosen: Tensor, widths: np.ndarray, named: NamedLogprobs | None = None) -> StepLogprobs:
    """Returns log-probabilities under softmax(logits), for the rows with a width of 0 or more; zeros for the others."""
    wanted = torch.from_numpy(np.flatnonzero(widths >= 0))
    width = min(common_width(widths), logits.shape[1])
    sampled = torch.zeros(len(logits))
    top_ids, top = torch.zeros(len(logits), width, dtype=torch.int32), torch.zeros(len(logits), width)
    all_logprobs = logits[wanted].log_softmax(dim=-1)
    sampled[wanted] = all_logprobs.gather(1, chosen[wanted, None]).squeeze(1)
    values, ids = all_logprobs.topk(width, dim=-1)
    top[wanted], top_ids[wanted] = values, ids.to(torch.int32)
    if named is not None:
        rows, ids = torch.from_numpy(named.rows), torch.from_numpy(named.token_ids)
        top[rows, : ids.shape[1]] = logits[rows].log_softmax(dim=-1).gather(1, ids)
        top_ids[rows, : ids.shape[1]] = ids.to(torch.int32)
    return StepLogprobs(sampled.numpy(), top_ids.numpy(), top.numpy(), wide=_wide(logits, wide_rows(widths)))
