"""Second half of sampling: one program for each row merges its tiles' results, and filters tokens if it must."""

import triton
import triton.language as tl

from services.engine.kernels.gpu.sampling_noise import exponential, stream_of
from services.engine.kernels.gpu.sampling_scan import is_filtered, is_greedy
from services.engine.kernels.gpu.sampling_search import (
    LIST_SIZE,
    MAX_FOUND,
    collect,
    first_with_key,
    key_of_rank,
    largest_reaching,
    listed,
    sums_from,
)
from services.engine.kernels.gpu.sampling_tiles import GROUP, NO_KEY, below, coldness, first, key_of, logit_of

_LIST_SIZE = tl.constexpr(LIST_SIZE)
_WANTED = tl.constexpr(512)  # tokens that are looked at first if there is no top_k
_BLOCK = tl.constexpr(2048)


@triton.jit(do_not_specialize_on_alignment=["out"])
def choose_greedy(
    vocab: tl.tensor,
    num_tiles: tl.tensor,
    tops: tl.tensor,  # float32[N, tiles]: see `scan_greedy`
    tokens: tl.tensor,  # int32[N, tiles]
    out: tl.tensor,  # int32[N]
    TILES: tl.constexpr,  # a power of two, not below num_tiles
) -> None:
    """Chooses the first of the highest logits; -1 if one is not finite."""
    row = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    here = tiles < num_tiles
    top = tl.load(tops + row * num_tiles + tiles, mask=here, other=float("-inf"))
    if _any_nan(top):
        tl.store(out + row, -1)
    else:
        token = tl.load(tokens + row * num_tiles + tiles, mask=here, other=vocab)
        tl.store(out + row, first(top == tl.max(top, axis=0), token, vocab))


@triton.jit
def _any_nan(numbers: tl.tensor) -> tl.tensor:
    """Returns True if one of the numbers is NaN."""
    return tl.max((numbers != numbers).to(tl.int32), axis=0) > 0


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p", "seed", "position", "out"])
def choose_draw(
    logits: tl.tensor,  # this and the following: see `scan_draw`
    stride: tl.tensor,
    vocab: tl.tensor,
    num_tiles: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    tops: tl.tensor,
    amounts: tl.tensor,
    tokens: tl.tensor,
    group_tops: tl.tensor,
    groups_stride: tl.tensor,
    lists: tl.tensor,  # int32[N, LIST_SIZE]
    out: tl.tensor,  # int32[N]
    FILTERED: tl.constexpr,
    SHIFT: tl.constexpr,
    TILES: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
) -> None:
    """Chooses a token for every row; -1 for one with a logit that is not finite."""
    row = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    here = tiles < num_tiles
    tile_top = tl.load(tops + row * num_tiles + tiles, mask=here, other=float("-inf"))
    strange = _any_nan(tile_top)
    tile_top = tl.where(strange, 0.0, tile_top)
    top = tl.max(tile_top, axis=0)
    cold = coldness(tl.load(temperature + row))
    lower = below(tile_top, top, cold)
    if strange:
        tl.store(out + row, -1)
    elif is_greedy(temperature, top_k, row, FILTERED):
        token = tl.load(tokens + row * num_tiles + tiles, mask=here, other=vocab)
        tl.store(out + row, first(here & (tile_top == top), token, vocab))
    elif is_filtered(top_k, top_p, min_p, row, vocab, FILTERED):
        amount = tl.load(amounts + row * num_tiles + tiles, mask=here, other=0.0)
        weight = tl.sum(amount * tl.exp(lower), axis=0)
        stream = stream_of(tl.load(seed + row), tl.load(position + row))
        k = tl.load(top_k + row)
        chosen = _choose_filtered(
            logits + row.to(tl.int64) * stride,
            vocab,
            group_tops + row * groups_stride,
            lists + row * _LIST_SIZE,
            top,
            cold,
            weight,
            tl.where(k < vocab, tl.maximum(k, 0), 0),
            tl.load(top_p + row),
            tl.minimum(tl.load(min_p + row), 1.0),  # the best token is always kept
            stream,
            SHIFT,
            ALL_GROUPS,
        )
        tl.store(out + row, chosen)
    else:
        amount = tl.load(amounts + row * num_tiles + tiles, mask=here, other=float("inf"))
        time = tl.where(here, tl.log(amount) - lower, float("inf"))
        token = tl.load(tokens + row * num_tiles + tiles, mask=here, other=vocab)
        tl.store(out + row, first(here & (time == tl.min(time, axis=0)), token, vocab))


@triton.jit
def _choose_filtered(
    row: tl.tensor,
    vocab: tl.tensor,
    group_tops: tl.tensor,
    lists: tl.tensor,
    top: tl.tensor,
    cold: tl.tensor,
    weight: tl.tensor,  # the sum for all tokens; the best one weighs 1
    k: tl.tensor,  # 0: off
    p: tl.tensor,
    least: tl.tensor,
    stream: tl.tensor,
    SHIFT: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
) -> tl.tensor:
    """Chooses a token among those that the filters keep; if the list of the best holds all of these, from the list.

    Tokens that min_p does not keep weigh nothing.
    """
    wanted = tl.where(k > 0, k, _WANTED)
    wanted = tl.minimum(wanted, tl.maximum(tl.cdiv(vocab, GROUP) // 2, MAX_FOUND // GROUP))
    num_found, bound, complete = collect(row, vocab, group_tops, wanted, lists, SHIFT, ALL_GROUPS)
    tokens, logits, here = listed(row, lists, num_found)
    weights = tl.where(here, tl.exp(below(logits, top, cold)), 0.0)
    reaches_p = (p < 1) & (tl.sum(weights, axis=0) >= p * weight)
    reaches_least = tl.min(tl.where(here, weights, 1.0), axis=0) < least
    all_listed = num_found == vocab
    enough = tl.where(k > 0, num_found >= k, reaches_p | reaches_least) | all_listed
    high = key_of(top, SHIFT) + 1
    if complete & enough:
        keys = tl.where(here, key_of(logits, SHIFT), NO_KEY)
        weights = tl.where(weights >= least, weights, 0.0)
        if (p < 1) & (least > 0) & (k == 0):
            weight = tl.sum(weights, axis=0)
            if (reaches_least | all_listed) == 0:
                _, weight = sums_from(row, vocab, top, cold, tl.full((), NO_KEY + 1, tl.int32), least, SHIFT)
        bound, weight = _bound_in_list(keys, weights, top, cold, weight, k, p, least, bound, high, SHIFT)
        if (p < 1) & (p * weight <= 1):
            chosen = first(keys == high - 1, tokens, vocab)
        else:
            time = _race_times(stream, tokens, weights, keys >= bound)
            chosen = first(time == tl.min(time, axis=0), tokens, vocab)
    else:
        chosen = _choose_in_row(row, vocab, top, cold, weight, k, p, least, stream, SHIFT)
    return chosen


@triton.jit
def _bound_in_list(
    keys: tl.tensor,
    weights: tl.tensor,
    top: tl.tensor,
    cold: tl.tensor,
    weight: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    least: tl.tensor,
    bound: tl.tensor,
    high: tl.tensor,
    SHIFT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the lowest key that top_k and top_p keep, and the weight of which top_p is a share. All tokens that they
    keep are listed.
    """
    if k > 0:
        ones = tl.where(keys > NO_KEY, 1.0, 0.0)
        target = k.to(tl.float32)
        bound = largest_reaching(keys, ones, target, target, bound, high)
        beyond = tl.sum(tl.where(keys >= bound, ones, 0.0), axis=0) - target  # tokens that tie with the last one
        tied = _weight_of(bound, top, cold, least, SHIFT)
        weight = tl.sum(tl.where(keys >= bound, weights, 0.0), axis=0) - beyond * tied
    if p < 1:
        bound = largest_reaching(keys, weights, p * weight, p * weight, bound, high)
    return bound, weight


@triton.jit
def _weight_of(key: tl.tensor, top: tl.tensor, cold: tl.tensor, least: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Returns the weight of a token with this key: 0 below `least`."""
    weight = tl.exp(below(logit_of(key, SHIFT), top, cold))
    return tl.where(weight >= least, weight, 0.0)


@triton.jit
def _choose_in_row(
    row: tl.tensor,
    vocab: tl.tensor,
    top: tl.tensor,
    cold: tl.tensor,
    weight: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    least: tl.tensor,
    stream: tl.tensor,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """Chooses a token among those that the filters keep, of all tokens.

    top_p needs no search. If the winner among all tokens is one that top_p keeps, it also wins among those. If not,
    top_p keeps no token with its key or a lower one, and the others race again. The number of races is about how often
    the weight of all tokens can be halved until that of the kept ones is left.
    """
    bound = tl.full((), NO_KEY + 1, tl.int32)
    last = key_of(top, SHIFT)
    if k > 0:
        bound = key_of_rank(row, vocab, k, last + 1, SHIFT)
        num_kept, weight = sums_from(row, vocab, top, cold, bound, least, SHIFT)
        weight -= (num_kept - k).to(tl.float32) * _weight_of(bound, top, cold, least, SHIFT)
    elif (p < 1) & (least > 0):
        _, weight = sums_from(row, vocab, top, cold, bound, least, SHIFT)
    chosen = vocab
    if (p < 1) & (p * weight <= 1):
        chosen = first_with_key(row, vocab, last, SHIFT)
    while chosen == vocab:
        winner, key = _race(row, vocab, top, cold, bound, least, stream, SHIFT)
        _, above = sums_from(row, vocab, top, cold, key + 1, least, SHIFT)
        bound = key + 1
        chosen = tl.where((p < 1) & (above >= p * weight) & (key < last), vocab, winner)
    return chosen


@triton.jit
def _race(
    row: tl.tensor,
    vocab: tl.tensor,
    top: tl.tensor,
    cold: tl.tensor,
    bound: tl.tensor,
    least: tl.tensor,
    stream: tl.tensor,
    SHIFT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the token that arrives first, and its key, among those with a key from `bound` on and a weight from
    `least` on.
    """
    lanes = tl.arange(0, _BLOCK)
    soonest = tl.full((_BLOCK,), float("inf"), tl.float32)
    winners = tl.full((_BLOCK,), 2**31 - 1, tl.int32)
    for start in range(0, vocab, _BLOCK):
        tokens = start + lanes
        inside = tokens < vocab
        logits = tl.load(row + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        weights = tl.exp(below(logits, top, cold))
        kept = inside & (key_of(logits, SHIFT) >= bound) & (weights >= least)
        time = _race_times(stream, tokens, weights, kept)
        sooner = time < soonest
        soonest, winners = tl.where(sooner, time, soonest), tl.where(sooner, tokens, winners)
    chosen = first(soonest == tl.min(soonest, axis=0), winners, vocab)
    return chosen, key_of(tl.load(row + chosen).to(tl.float32), SHIFT)


@triton.jit
def _race_times(stream: tl.tensor, tokens: tl.tensor, weights: tl.tensor, kept: tl.tensor) -> tl.tensor:
    """Returns each token's time of arrival: infinite if it is not kept or weighs nothing."""
    running = kept & (weights > 0)
    return tl.where(running, exponential(stream, tokens) / tl.where(running, weights, 1.0), float("inf"))
