"""Searches in one row by one program: its best tokens without sorting, and the key at which a sum from the best
downwards ends.

There are two ways. Nearly always few tokens matter: `collect` finds them through the groups' highest logits, reads only
groups that have any, and lists the tokens for a search in registers. If too many matter, because a distribution is flat
or logits are equal, the other functions read the whole row.
"""

import triton
import triton.language as tl

from services.engine.kernels.gpu.sampling_tiles import GROUP, NO_KEY, below, key_of

MAX_GROUPS = tl.constexpr(1024)  # groups that `collect` reads
MAX_FOUND = tl.constexpr(2048)  # tokens that it lists
LIST_SIZE = MAX_GROUPS.value + MAX_FOUND.value  # int32 of scratch memory for a row

_CHUNK = tl.constexpr(32)  # groups at a time
_BLOCK = tl.constexpr(2048)  # tokens at a time
_STAGES = tl.constexpr(3)  # 8 KiB each, under way at once: one program has to keep a multiprocessor busy


@triton.jit
def largest_reaching(
    keys: tl.tensor,  # int32[n]
    amounts: tl.tensor,  # float32[n], none below 0
    target: tl.tensor,
    limit: tl.tensor,  # at least the target
    low: tl.tensor,
    high: tl.tensor,
) -> tl.tensor:
    """Returns the largest key in [low, high) such that the amounts from it upwards reach `target`; `low` if none does.

    The bisection ends early once the amounts reach the target and not more than `limit`.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    reached = float("inf")
    while (high - low > 1) & (reached > limit):
        middle = (low + high) >> 1
        amount = tl.sum(tl.where(keys >= middle.to(tl.int32), amounts, 0.0), axis=0)
        enough = amount >= target
        reached = tl.where(enough, amount, reached)
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low.to(tl.int32)


@triton.jit
def collect(
    row: tl.tensor,  # logits
    vocab: tl.tensor,
    group_tops: tl.tensor,  # float32, of this row
    wanted: tl.tensor,
    lists: tl.tensor,  # int32[LIST_SIZE] of this row: groups, then from MAX_GROUPS on tokens
    SHIFT: tl.constexpr,
    ALL_GROUPS: tl.constexpr,  # a power of two, not below the number of groups
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Lists all tokens whose key is at least a bound, in the order of their ids.

    The bound is such that at least `wanted` tokens are listed, and seldom many times as many: about so many groups have
    their highest logit above it. If there are no more groups than `wanted`, every token is listed.

    Returns the number of such tokens, the bound, and whether all are listed. If not, the number means nothing.
    """
    groups = tl.arange(0, ALL_GROUPS)
    num_groups = tl.cdiv(vocab, GROUP)
    tops = tl.load(group_tops + groups, mask=groups < num_groups, other=float("-inf"))
    keys = tl.where(groups < num_groups, key_of(tops, SHIFT), NO_KEY)
    bound = tl.min(tl.where(groups < num_groups, keys, 2**31 - 1), axis=0)
    ones = tl.full((ALL_GROUPS,), 1.0, tl.float32)
    target = wanted.to(tl.float32)
    bound = largest_reaching(keys, ones, target, target * 1.25, bound, tl.max(keys, axis=0) + 1)
    bound = tl.where(wanted < num_groups, bound, NO_KEY + 1)
    matters = (keys >= bound).to(tl.int32)
    num_active = tl.sum(matters, axis=0)
    places = tl.cumsum(matters, axis=0) - 1
    tl.store(lists + places, groups, mask=(matters > 0) & (places < MAX_GROUPS))
    tl.debug_barrier()
    num_found = tl.zeros((), tl.int32)
    if num_active <= MAX_GROUPS:
        num_found = _list_tokens(row, vocab, lists, num_active, bound, SHIFT)
    tl.debug_barrier()
    return num_found, bound, (num_active <= MAX_GROUPS) & (num_found <= MAX_FOUND)


@triton.jit
def _list_tokens(
    row: tl.tensor,
    vocab: tl.tensor,
    lists: tl.tensor,
    num_groups: tl.tensor,  # listed groups
    bound: tl.tensor,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """Lists the tokens of the listed groups with a key from `bound` on. Returns their number, listed or not."""
    num_found = tl.zeros((), tl.int32)
    for start in range(0, num_groups, _CHUNK):
        lanes = start + tl.arange(0, _CHUNK)
        groups = tl.load(lists + lanes, mask=lanes < num_groups, other=0)
        tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (lanes < num_groups)[:, None] & (tokens < vocab)
        logits = tl.load(row + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        taken = (inside & (key_of(logits, SHIFT) >= bound)).to(tl.int32)
        counts = tl.sum(taken, axis=1)
        before = num_found + tl.cumsum(counts, axis=0) - counts
        places = before[:, None] + tl.cumsum(taken, axis=1) - 1
        tl.store(lists + MAX_GROUPS + places, tokens, mask=(taken > 0) & (places < MAX_FOUND))
        num_found += tl.sum(counts, axis=0)
    return num_found


@triton.jit
def listed(row: tl.tensor, lists: tl.tensor, num_found: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns the listed tokens: ids int32, logits float32, and bool that is False past the last one;
    [MAX_FOUND] each.
    """
    lanes = tl.arange(0, MAX_FOUND)
    here = lanes < num_found
    tokens = tl.load(lists + MAX_GROUPS + lanes, mask=here, other=0)
    return tokens, tl.load(row + tokens, mask=here, other=float("-inf")).to(tl.float32), here


@triton.jit
def key_of_rank(row: tl.tensor, vocab: tl.tensor, rank: tl.tensor, high: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Returns the largest key below `high` such that at least `rank` of a row's tokens have it or a larger one.

    Each pass over the row leaves a quarter of the possible keys. Exact up to 2**24 tokens.
    """
    low, high = tl.full((), NO_KEY + 1, tl.int64), high.to(tl.int64)
    reached = vocab
    while (high - low > 1) & (reached != rank):
        a = low + ((high - low) >> 2)
        b = low + ((high - low) >> 1)
        c = low + ((3 * (high - low)) >> 2)
        from_a, from_b, from_c = _counts_from(row, vocab, a.to(tl.int32), b.to(tl.int32), c.to(tl.int32), SHIFT)
        first, second, third = from_a >= rank, from_b >= rank, from_c >= rank
        high = tl.where(first, tl.where(second, tl.where(third, high, c), b), a)
        low = tl.where(third, c, tl.where(second, b, tl.where(first, a, low)))
        reached = tl.where(third, from_c, tl.where(second, from_b, tl.where(first, from_a, reached)))
    return low.to(tl.int32)


@triton.jit
def _counts_from(
    row: tl.tensor, vocab: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, SHIFT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Counts a row's tokens with a key from a on, from b on, and from c on."""
    lanes = tl.arange(0, _BLOCK)
    from_a = tl.zeros((_BLOCK,), tl.int32)
    from_b = tl.zeros((_BLOCK,), tl.int32)
    from_c = tl.zeros((_BLOCK,), tl.int32)
    for start in range(0, vocab, _BLOCK):
        inside = start + lanes < vocab
        logits = tl.load(row + start + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        keys = tl.where(inside, key_of(logits, SHIFT), NO_KEY)
        from_a += (keys >= a).to(tl.int32)
        from_b += (keys >= b).to(tl.int32)
        from_c += (keys >= c).to(tl.int32)
    return tl.sum(from_a, axis=0), tl.sum(from_b, axis=0), tl.sum(from_c, axis=0)


@triton.jit
def sums_from(
    row: tl.tensor,
    vocab: tl.tensor,
    top: tl.tensor,
    cold: tl.tensor,
    bound: tl.tensor,
    least: tl.tensor,
    SHIFT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the number of a row's tokens with a key from `bound` on, int32, and the sum of their weights that are
    `least` or more.
    """
    lanes = tl.arange(0, _BLOCK)
    counts = tl.zeros((_BLOCK,), tl.int32)
    weights = tl.zeros((_BLOCK,), tl.float32)
    for start in tl.range(0, vocab, _BLOCK, num_stages=_STAGES):
        inside = start + lanes < vocab
        logits = tl.load(row + start + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        taken = inside & (key_of(logits, SHIFT) >= bound)
        counts += taken.to(tl.int32)
        weight = tl.exp(below(logits, top, cold))
        weights += tl.where(taken & (weight >= least), weight, 0.0)
    return tl.sum(counts, axis=0), tl.sum(weights, axis=0)


@triton.jit
def first_with_key(row: tl.tensor, vocab: tl.tensor, key: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Returns the first of a row's tokens that have this key; one has it."""
    lanes = tl.arange(0, _BLOCK)
    found = tl.full((_BLOCK,), 2**31 - 1, tl.int32)
    for start in range(0, vocab, _BLOCK):
        tokens = start + lanes
        inside = tokens < vocab
        keys = key_of(tl.load(row + tokens, mask=inside, other=float("-inf")).to(tl.float32), SHIFT)
        found = tl.minimum(found, tl.where(inside & (keys == key), tokens, 2**31 - 1))
    return tl.min(found, axis=0)
