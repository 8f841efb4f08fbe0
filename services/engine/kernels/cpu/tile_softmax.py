"""The online softmax of attention over tiles, FlashAttention's (Dao et al. 2022, arXiv 2205.14135).

Each query has a lane, so that no lane needs another. The reference of a query is its highest score, or an earlier
highest score: a new one is taken only when the highest is so far above that the weights grow too large.
"""

from typing import Any

from numba import float32

from services.engine.kernels.cpu.exponential import capped_score, exp2, exp2_for_bfloat16
from services.engine.kernels.cpu.intrinsics import njit
from services.engine.kernels.cpu.vectors import (
    any_above,
    larger_of,
    load_floats,
    multiply_add,
    round_half_up,
    spread,
    store_floats,
    store_pairs,
    where_above,
)

LOWEST = float32(-1e28)  # a reference before there is a score
# The score of a hidden key. With a scale from 1e-7 to 300 it becomes no reference, since all keys of a chunk may be
# hidden from a query, and stays finite.
HIDDEN = float32(-1e36)
TOTAL, LIMITS, STATE_BYTES = 64, 128, 192  # bytes; a state: 16 queries' references, totals, limits
GROWTH = float32(8)  # the power of two by which weights may grow before a new reference is taken
_ROW = 128  # bytes of 32 scores


@njit
def highest_of(scores: int, count: int) -> Any:
    """Returns the highest score of each query over `count` keys, a multiple of 4."""
    a = b = c = d = spread(HIDDEN)
    for k in range(0, count, 4):
        at = scores + k * _ROW
        a = larger_of(load_floats(at), a)
        b = larger_of(load_floats(at + _ROW), b)
        c = larger_of(load_floats(at + 2 * _ROW), c)
        d = larger_of(load_floats(at + 3 * _ROW), d)
    return larger_of(larger_of(a, b), larger_of(c, d))


@njit
def cap_scores(scores: int, count: int, scale: Any, cap: Any) -> None:
    """Multiplies the scores of `count` keys by the scale, and gives them a soft cap."""
    for at in range(scores, scores + count * _ROW, _ROW):
        store_floats(at, capped_score(load_floats(at), scale, cap))


@njit
def hide(scores: int, begin: int, end: int, from_key: int, limits: Any) -> None:
    """Hides, of the keys from `begin` to `end`, those from each query's limit on. Scores begin at key `from_key`."""
    for k in range(max(begin, from_key), end):
        at = scores + (k - from_key) * _ROW
        store_floats(at, where_above(limits, spread(float32(k)), load_floats(at), spread(HIDDEN)))


@njit
def hide_outside_window(scores: int, count: int, from_key: int, limits: Any, highest: int, window: int) -> None:
    """Hides keys that are `window` or more before a query's limit."""
    for k in range(from_key, min(from_key + count, highest - window)):
        at = scores + (k - from_key) * _ROW
        after = spread(float32(k + window) + float32(0.5))
        store_floats(at, where_above(after, limits, load_floats(at), spread(HIDDEN)))


def make_soften(head_dim: int, *, as_pairs: bool) -> Any:
    """Makes a function that kernels call. It turns scores into weights, and shrinks sums to a new reference.

    Its arguments: address of 16 queries' scores; how many keys, a multiple of 4; scale; the queries' state; their sums.

    as_pairs: weights of two keys become one word, in half as many rows.
    """

    @njit
    def weigh_pairs(scores: int, count: int, scale: Any, down: Any) -> Any:
        even_sum = odd_sum = spread(float32(0))
        for k in range(0, count, 2):
            at = scores + k * _ROW
            even = exp2_for_bfloat16(multiply_add(load_floats(at), scale, down))
            odd = exp2_for_bfloat16(multiply_add(load_floats(at + _ROW), scale, down))
            store_pairs(scores + k // 2 * _ROW, round_half_up(even), round_half_up(odd))
            even_sum, odd_sum = even_sum + even, odd_sum + odd
        return even_sum + odd_sum

    @njit
    def weigh_singles(scores: int, count: int, scale: Any, down: Any) -> Any:
        even_sum = odd_sum = spread(float32(0))
        for k in range(0, count, 2):
            at = scores + k * _ROW
            even = exp2(multiply_add(load_floats(at), scale, down))
            odd = exp2(multiply_add(load_floats(at + _ROW), scale, down))
            store_floats(at, even)
            store_floats(at + _ROW, odd)
            even_sum, odd_sum = even_sum + even, odd_sum + odd
        return even_sum + odd_sum

    weigh = weigh_pairs if as_pairs else weigh_singles

    @njit
    def soften(scores: int, count: int, scale: Any, state: int, sums: int) -> None:
        reference, total = load_floats(state), load_floats(state + TOTAL)
        highest = highest_of(scores, count) * scale
        if any_above(highest, reference + spread(GROWTH)):
            higher = larger_of(highest, reference)
            shrink = exp2(reference - higher)
            for d in range(head_dim):
                store_floats(sums + d * _ROW, load_floats(sums + d * _ROW) * shrink)
            total = total * shrink
            reference = higher
            store_floats(state, reference)
        store_floats(state + TOTAL, total + weigh(scores, count, scale, spread(float32(0)) - reference))

    return soften
