"""First half of sampling: every tile of every row has a program of its own, which writes a few numbers about the tile.

Programs are (tile, row). Weights are relative to the tile's highest logit, which may be below the row's; the second
half corrects that.
"""

import triton
import triton.language as tl

from services.engine.kernels.gpu.sampling_noise import exponential, stream_of
from services.engine.kernels.gpu.sampling_tiles import (
    GROUPS,
    below,
    coldness,
    first_in_tile,
    highest,
    load_tile,
    lowest,
    marked,
    total,
    without_strange,
)


@triton.jit
def is_filtered(
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    row: tl.tensor,
    vocab: tl.tensor,
    FILTERED: tl.constexpr,
) -> tl.tensor:
    """Returns True if a row with a temperature may not choose among all tokens. Reads nothing unless FILTERED."""
    if FILTERED:
        k = tl.load(top_k + row)
        return ((k > 0) & (k < vocab)) | (tl.load(top_p + row) < 1) | (tl.load(min_p + row) > 0)
    else:
        return False


@triton.jit
def is_greedy(temperature: tl.tensor, top_k: tl.tensor, row: tl.tensor, FILTERED: tl.constexpr) -> tl.tensor:
    """Returns True if a row gets its likeliest token: it has no temperature, or top_k leaves no other."""
    cold = tl.load(temperature + row) <= 0
    if FILTERED:
        return cold | (tl.load(top_k + row) == 1)
    else:
        return cold


@triton.jit
def scan_greedy(
    logits: tl.tensor,  # [N, vocab], rows `stride` apart
    stride: tl.tensor,
    vocab: tl.tensor,
    tops: tl.tensor,  # float32[N, tiles]: highest logits; NaN: one is not finite
    tokens: tl.tensor,  # int32[N, tiles]: the first token with that logit
    EDITED: tl.constexpr,  # whether logits may be -inf
) -> None:
    """Finds the highest logit of each tile."""
    tile, row = tl.program_id(0), tl.program_id(1)
    found, ids = load_tile(logits + row.to(tl.int64) * stride, tile, vocab)
    found, strange = without_strange(found, ids, vocab, EDITED)
    top = highest(found)
    place = row * tl.num_programs(0) + tile
    tl.store(tops + place, marked(top, strange))
    tl.store(tokens + place, first_in_tile(found == top, ids, vocab))


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p", "seed", "position"])
def scan_draw(
    logits: tl.tensor,  # [N, vocab], rows `stride` apart
    stride: tl.tensor,
    vocab: tl.tensor,
    temperature: tl.tensor,  # float32[N]
    top_k: tl.tensor,  # int32[N]
    top_p: tl.tensor,  # float32[N]
    min_p: tl.tensor,  # float32[N]
    seed: tl.tensor,  # int64[N]
    position: tl.tensor,  # int64[N]
    tops: tl.tensor,  # float32[N, tiles]: highest logits; NaN: one is not finite
    amounts: tl.tensor,  # float32[N, tiles]: filtered rows' sums of weights; without filters the lowest race time
    tokens: tl.tensor,  # int32[N, tiles]: greedy rows' first highest; without filters the one with that time
    group_tops: tl.tensor,  # float32[N, tiles * GROUPS]: of filtered rows, the highest logit of each group
    FILTERED: tl.constexpr,  # whether any row is filtered
    EDITED: tl.constexpr,  # whether logits may be -inf
) -> None:
    """Finds each tile's candidate for a greedy row or one without filters, and its sums for a row with filters.

    Rows without filters race: each token arrives after an exponential time divided by its weight.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    found, ids = load_tile(logits + row.to(tl.int64) * stride, tile, vocab)
    found, strange = without_strange(found, ids, vocab, EDITED)
    warmth = tl.load(temperature + row)
    top = highest(found)
    place = row * tl.num_programs(0) + tile
    tl.store(tops + place, marked(top, strange))
    if is_greedy(temperature, top_k, row, FILTERED):
        tl.store(tokens + place, first_in_tile(found == top, ids, vocab))
    elif is_filtered(top_k, top_p, min_p, row, vocab, FILTERED):
        tl.store(group_tops + place * GROUPS + tl.arange(0, GROUPS), tl.max(found, axis=1))
        tl.store(amounts + place, total(tl.where(ids < vocab, tl.exp(below(found, top, coldness(warmth))), 0.0)))
    else:
        stream = stream_of(tl.load(seed + row), tl.load(position + row))
        late = tl.exp(tl.minimum(-below(found, top, coldness(warmth)), 80.0))  # a later token loses as well
        time = tl.where(ids < vocab, exponential(stream, ids) * late, float("inf"))
        soonest = lowest(time)
        tl.store(amounts + place, soonest)
        tl.store(tokens + place, first_in_tile(time == soonest, ids, vocab))


@triton.jit(do_not_specialize_on_alignment=["widths"])
def scan_softmax(
    logits: tl.tensor,  # [N, vocab], rows `stride` apart
    stride: tl.tensor,
    vocab: tl.tensor,
    widths: tl.tensor,  # int32[N]; below 0: the row is skipped
    tops: tl.tensor,  # float32[N, tiles]: highest logits
    amounts: tl.tensor,  # float32[N, tiles]: sums of weights; NaN: a logit is not finite
    group_tops: tl.tensor,  # float32[N, tiles * GROUPS]: the highest logit of each group
) -> None:
    """Computes each tile's share of logprobs, and the groups' highest logits for a search of the likeliest tokens."""
    tile, row = tl.program_id(0), tl.program_id(1)
    if tl.load(widths + row) >= 0:
        found, ids = load_tile(logits + row.to(tl.int64) * stride, tile, vocab)
        found, strange = without_strange(found, ids, vocab, False)
        group_top = tl.max(found, axis=1)
        top = tl.max(group_top, axis=0)
        place = row * tl.num_programs(0) + tile
        tl.store(group_tops + place * GROUPS + tl.arange(0, GROUPS), group_top)
        tl.store(tops + place, top)
        amount = total(tl.where(ids < vocab, tl.exp(below(found, top, 1.0)), 0.0))
        tl.store(amounts + place, marked(amount, strange))
