"""The online softmax of attention of single tokens, head by head: Milakov and Gimelshein 2018, arXiv 1805.02867."""

from typing import Any

from numba import float32

from services.engine.kernels.cpu.exponential import exp2, exp2_for_bfloat16
from services.engine.kernels.cpu.intrinsics import njit
from services.engine.kernels.cpu.tile_softmax import LOWEST
from services.engine.kernels.cpu.vectors import (
    LANES,
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
def hide(scores: int, count: int, begin: int, end: int) -> None:
    """Hides, of `count` keys, those before `begin` and from `end` on: gives them the lowest score."""
    for k in range(0, count, LANES):
        if k < begin or k + LANES > end:
            number = lane_numbers() + spread(float32(k))
            seen = where_above(spread(float32(end)), number, load_floats(scores + k * 4), spread(LOWEST))
            seen = where_above(spread(float32(begin)), number, spread(LOWEST), seen)
            store_floats(scores + k * 4, seen)


def make_soften(num_columns: int, pair_bytes: int, column_bytes: int, *, as_pairs: bool) -> Any:
    """Makes a function that kernels call for one head.

    Its arguments: address of the head's scores; how many keys, a multiple of 16; scale; pointer to the head's highest
    score so far; addresses of 16 partial totals, of the sums, and of the weights that it writes, bfloat16 with
    `as_pairs`, else float32.

    Sums are vectors of 16 columns. The two of a pair are column_bytes apart; pairs are pair_bytes apart.
    """

    @njit
    def shrink_sums(sums: int, factor: Any) -> None:
        for column in range(num_columns):
            at = sums + column // 2 * pair_bytes + column % 2 * column_bytes
            store_floats(at, load_floats(at) * factor)

    @njit
    def soften(scores: int, count: int, scale: float, top: Any, total: int, sums: int, weights: int) -> None:
        highest = spread(LOWEST)
        for k in range(0, count, LANES):
            highest = larger_of(load_floats(scores + k * 4), highest)
        reference = max(top[0], highest_lane(highest) * scale)
        of_total = load_floats(total)
        if reference > top[0]:
            shrink = exp2(spread(top[0] - reference))
            of_total = of_total * shrink
            shrink_sums(sums, shrink)
            top[0] = reference
        for k in range(0, count, LANES):
            exponent = multiply_add(load_floats(scores + k * 4), spread(scale), spread(-reference))
            if as_pairs:
                weight = exp2_for_bfloat16(exponent)
                store_cut(weights + k * 2, round_half_up(weight))
            else:
                weight = exp2(exponent)
                store_floats(weights + k * 4, weight)
            of_total = of_total + weight
        store_floats(total, of_total)

    return soften
