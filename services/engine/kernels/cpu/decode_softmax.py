"""The online softmax of attention of single tokens, 16 keys and a head at a time.

Milakov and Gimelshein 2018, arXiv 1805.02867. The reference of a head is a score near its highest, as in
`tile_softmax`.
"""

from typing import Any

from numba import float32

from services.engine.kernels.cpu.exponential import exp2, exp2_for_bfloat16
from services.engine.kernels.cpu.intrinsics import njit
from services.engine.kernels.cpu.tile_softmax import GROWTH, HIDDEN
from services.engine.kernels.cpu.vectors import (
    LANES,
    any_above,
    highest_lane,
    lane_numbers,
    larger_of,
    load_floats,
    multiply_add,
    round_half_up,
    spread,
    store_cut,
    store_floats,
    where_above,
)


@njit
def hide(scores: int, begin: int, end: int) -> None:
    """Hides, of 16 keys, those before `begin` and from `end` on."""
    if begin > 0 or end < LANES:
        seen = where_above(spread(float32(end)), lane_numbers(), load_floats(scores), spread(HIDDEN))
        store_floats(scores, where_above(spread(float32(begin)), lane_numbers(), spread(HIDDEN), seen))


@njit
def clear_hidden(values: int, begin: int, end: int) -> None:
    """Sets, of 16 values, those before `begin` and from `end` on to 0."""
    seen = where_above(spread(float32(end)), lane_numbers(), load_floats(values), spread(float32(0)))
    store_floats(values, where_above(spread(float32(begin)), lane_numbers(), spread(float32(0)), seen))


def make_soften(depth: int, *, as_pairs: bool, scaled: bool = False) -> Any:
    """Makes a function that kernels call for one head and 16 keys.

    Its arguments: address of the scores; scale; pointer to the head's reference; addresses of 16 partial totals, of the
    sums, float32[depth], and of the weights that it writes, bfloat16 with `as_pairs`, else float32; address of 16
    scales of values, by which the weights are multiplied if they are `scaled`, but not the totals.
    """

    @njit
    def take_new_reference(scores: Any, scale: float, reference: Any, total: int, sums: int) -> None:
        """Takes the highest score, and shrinks the totals and sums by as much as it is above the reference."""
        higher = highest_lane(larger_of(scores, spread(HIDDEN))) * scale  # none is NaN
        shrink = exp2(spread(reference[0] - higher))
        store_floats(total, load_floats(total) * shrink)
        for at in range(sums, sums + depth * 4, LANES * 4):
            store_floats(at, load_floats(at) * shrink)
        reference[0] = higher

    @njit
    def soften(at: int, scale: float, reference: Any, total: int, sums: int, weights: int, value_scales: int) -> None:
        scores = load_floats(at)
        exponent = multiply_add(scores, spread(scale), spread(-reference[0]))
        if any_above(exponent, spread(GROWTH)):
            take_new_reference(scores, scale, reference, total, sums)
            exponent = multiply_add(scores, spread(scale), spread(-reference[0]))
        if as_pairs:
            weight = exp2_for_bfloat16(exponent)
            store_cut(weights, round_half_up(weight * load_floats(value_scales) if scaled else weight))
        else:
            weight = exp2(exponent)
            store_floats(weights, weight * load_floats(value_scales) if scaled else weight)
        store_floats(total, load_floats(total) + weight)

    return soften
