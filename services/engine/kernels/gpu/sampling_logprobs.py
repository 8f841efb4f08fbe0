"""Log-probabilities of one token of each row, and of the row's likeliest tokens, best first."""

import triton
import triton.language as tl

from services.engine.kernels.gpu.sampling_search import LIST_SIZE, MAX_FOUND, collect, listed
from services.engine.kernels.gpu.sampling_tiles import GROUP, NO_KEY, below, first, key_of, logit_of

_LIST_SIZE = tl.constexpr(LIST_SIZE)
_BLOCK = tl.constexpr(2048)
_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["chosen", "widths"])
def choose_likeliest(
    logits: tl.tensor,  # [N, vocab], rows `stride` apart
    stride: tl.tensor,
    vocab: tl.tensor,
    num_tiles: tl.tensor,
    chosen: tl.tensor,  # int32[N]; -1: a logit is not finite
    widths: tl.tensor,  # int32[N]; below 0: the row gets zeros
    width: tl.tensor,  # of the outputs; at most `vocab`
    tops: tl.tensor,  # float32[N, tiles]: see `scan_softmax`
    amounts: tl.tensor,  # float32[N, tiles]
    group_tops: tl.tensor,
    groups_stride: tl.tensor,
    lists: tl.tensor,  # int32[N, LIST_SIZE]
    sampled: tl.tensor,  # float32[N]
    best_ids: tl.tensor,  # int32[N, width]
    best: tl.tensor,  # float32[N, width]
    SHIFT: tl.constexpr,
    TILES: tl.constexpr,  # a power of two, not below num_tiles
    ALL_GROUPS: tl.constexpr,  # a power of two, not below the number of groups
) -> None:
    """Fills a row of the outputs."""
    row = tl.program_id(0)
    best_ids += row.to(tl.int64) * width
    best += row.to(tl.int64) * width
    if tl.load(widths + row) >= 0:
        tiles = tl.arange(0, TILES)
        here = tiles < num_tiles
        tile_top = tl.load(tops + row * num_tiles + tiles, mask=here, other=float("-inf"))
        amount = tl.load(amounts + row * num_tiles + tiles, mask=here, other=0.0)
        top = tl.max(tile_top, axis=0)
        log_sum = tl.log(tl.sum(amount * tl.exp(below(tile_top, top, 1.0)), axis=0))
        logits += row.to(tl.int64) * stride
        own = tl.load(logits + tl.maximum(tl.load(chosen + row), 0)).to(tl.float32)
        tl.store(sampled + row, below(own, top, 1.0) - log_sum)
        if width > 0:
            group_tops += row.to(tl.int64) * groups_stride
            lists += row.to(tl.int64) * _LIST_SIZE
            wanted = tl.minimum(width, tl.maximum(tl.cdiv(vocab, GROUP) // 2, MAX_FOUND // GROUP))
            num_found, _, complete = collect(logits, vocab, group_tops, wanted, lists, SHIFT, ALL_GROUPS)
            if complete & (num_found >= width):
                _best_of_list(logits, vocab, lists, num_found, width, top, log_sum, best_ids, best, SHIFT)
            else:
                _best_of_row(logits, vocab, width, top, log_sum, best_ids, best, SHIFT)
    else:
        tl.store(sampled + row, 0.0)
        for place in range(width):
            tl.store(best_ids + place, 0)
            tl.store(best + place, 0.0)


@triton.jit
def _best_of_list(
    row: tl.tensor,
    vocab: tl.tensor,
    lists: tl.tensor,
    num_found: tl.tensor,
    width: tl.tensor,
    top: tl.tensor,
    log_sum: tl.tensor,
    best_ids: tl.tensor,
    best: tl.tensor,
    SHIFT: tl.constexpr,
) -> None:
    """Writes the best tokens, one after the other: finds the best in the list, each time without those found before."""
    tokens, logits, here = listed(row, lists, num_found)
    keys = tl.where(here, key_of(logits, SHIFT), NO_KEY)
    for place in range(width):
        key = tl.max(keys, axis=0)
        token = first(keys == key, tokens, vocab)
        tl.store(best_ids + place, token)
        tl.store(best + place, below(logit_of(key, SHIFT), top, 1.0) - log_sum)
        keys = tl.where(here & (tokens == token), NO_KEY, keys)


@triton.jit
def _best_of_row(
    row: tl.tensor,
    vocab: tl.tensor,
    width: tl.tensor,
    top: tl.tensor,
    log_sum: tl.tensor,
    best_ids: tl.tensor,
    best: tl.tensor,
    SHIFT: tl.constexpr,
) -> None:
    """Writes the best tokens, one after the other: finds the best of all tokens that come after the one before."""
    lanes = tl.arange(0, _BLOCK)
    key = tl.full((), 2**31 - 1, tl.int32)
    token = tl.full((), -1, tl.int32)
    for place in range(width):
        keys = tl.full((_BLOCK,), NO_KEY, tl.int32)
        tokens = tl.full((_BLOCK,), _NO_TOKEN, tl.int32)
        for start in range(0, vocab, _BLOCK):
            ids = start + lanes
            inside = ids < vocab
            found = key_of(tl.load(row + ids, mask=inside, other=float("-inf")).to(tl.float32), SHIFT)
            better = inside & ((found < key) | ((found == key) & (ids > token))) & (found > keys)
            keys, tokens = tl.where(better, found, keys), tl.where(better, ids, tokens)
        key = tl.max(keys, axis=0)
        token = first(keys == key, tokens, vocab)
        tl.store(best_ids + place, token)
        tl.store(best + place, below(logit_of(key, SHIFT), top, 1.0) - log_sum)
