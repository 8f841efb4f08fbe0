"""Kernels around the products of experts: the choice of each token's experts, pairs of a token and an expert sorted by
expert, and the weighted sum of what a token's experts made of it.

    plan   int32: how many blocks of rows there are, and how many pairs; for each block its expert, its first pair and
           its number of pairs
    pairs  int32[tokens * top_k] in the order of experts: the token of each pair
    places int32[tokens, top_k]: where each token's pairs are in that order; -1: its expert is not here

The expert of a block is data, so that a recorded step serves any choice. Only pairs whose expert is here are in the
plan; experts count there by their places among those that are here.
"""

from typing import Any

from numba import float32, int32, int64

from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.exponential import LOG2_E, exp2
from services.engine.kernels.cpu.intrinsics import (
    address_of,
    float64_of,
    float_pointer,
    int_pointer,
    long_pointer,
    njit,
    stack,
)
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.vectors import LANES, divide, load_floats, multiply_add, spread, store_floats
from services.engine.kernels.routing_numbers import Scores

MOST_EXPERTS, MOST_CHOSEN = 512, 64
PLAN_HEAD, PLAN_WORDS = 2, 3  # words before the blocks, and of each block
PLAN_PAIRS_AT = 4  # the byte of a plan at which its number of pairs is
_LEAST_SUM = float32(1e-20)  # keeps weights finite where all scores are 0
_NEVER = float32(-3e38)


@njit
def item_of_plan(plan: int, item: int, panels: int, panels_at_once: int) -> tuple[int, int, int, int, int]:
    """Returns what an item of a product of experts has: the expert, the first of the rows and how many (0: the plan has
    fewer blocks), the first of the panels and the one after the last. Items that are next to each other are panels of
    the same block.
    """
    words = int_pointer(plan)
    items = (panels + panels_at_once - 1) // panels_at_once  # of a block
    block = item // items
    if block >= words[0]:
        return int64(0), int64(0), int64(0), int64(0), int64(0)
    entry = PLAN_HEAD + block * PLAN_WORDS
    first_panel = item % items * panels_at_once
    end_panel = min(first_panel + panels_at_once, panels)
    return int64(words[entry]), int64(words[entry + 1]), int64(words[entry + 2]), first_panel, end_panel


@per_item
def make_route(dtype: str, scores: Scores) -> Any:
    """Makes a kernel that chooses each token's experts, the best first, and of equal ones the first. An item is a
    token.

    Arguments of the kernel: logits and the elements from row to row; chosen, int32[tokens, top_k]; weights, float32 of
    that shape; experts, at most MOST_EXPERTS; top_k, at most MOST_CHOSEN; groups; groups that a token keeps; 1 if a
    group's score is the sum of its two highest, else 0; float32 correction [experts], or 0; 1 if weights are
    normalized, else 0; factor on the weights.
    """
    element = ELEMENTS[dtype]
    load, pointer, size = element.load, element.pointer, element.size
    arg = places(
        "logits stride chosen weights num_experts top_k num_groups groups_kept sums_best_two correction normalized "
        "scaling"
    )
    is_sigmoid, of_all = scores is Scores.SIGMOID, scores is Scores.SOFTMAX

    @njit(error_model="numpy")
    def exponentials(values: int, count: int, highest: float) -> float:
        """Replaces numbers by e to the power of their distance from the highest. Returns the sum."""
        shift, factor = spread(highest), spread(float32(LOG2_E))
        for at in range(0, count * 4, LANES * 4):
            store_floats(values + at, exp2((load_floats(values + at) - shift) * factor))
        total = float32(0)
        for i in range(count):
            total += float_pointer(values)[i]
        return total

    @njit(error_model="numpy")
    def sigmoids(source: int, target: int, count: int) -> None:
        one, factor = spread(float32(1)), spread(float32(-LOG2_E))
        for at in range(0, count * 4, LANES * 4):
            store_floats(target + at, divide(one, one + exp2(load_floats(source + at) * factor)))

    @njit
    def drop_groups(ranked: Any, count: int, groups: int, kept: int, sums_best_two: int) -> None:
        """Makes the numbers of all groups but the best so low that they are chosen last."""
        of_group = count // groups
        for _dropped in range(groups - kept):
            worst, worst_score = -1, float32(0)
            for group in range(groups):
                first, second = _NEVER, _NEVER
                for i in range(group * of_group, (group + 1) * of_group):
                    value = ranked[i]
                    if value > first:
                        first, second = value, first
                    elif value > second:
                        second = value
                if first == _NEVER:
                    continue  # it is dropped already
                score = first + second if sums_best_two != 0 else first
                if worst < 0 or score <= worst_score:  # of equal groups, the first ones are kept
                    worst, worst_score = group, score
            if worst >= 0:
                for i in range(worst * of_group, (worst + 1) * of_group):
                    ranked[i] = _NEVER

    @njit
    def best(ranked: Any, taken: Any, count: int) -> int:
        """Returns the place of the highest number that is not taken, and takes it; some place if numbers are NaN."""
        found = -1
        for i in range(count):
            if taken[i] == float32(0) and (found < 0 or ranked[i] > ranked[found]):
                found = i
        taken[found] = float32(1)
        return found

    @njit(error_model="numpy")
    def work(a: Any, token: int, _thread: int) -> None:
        count, top_k = a[arg.num_experts], a[arg.top_k]
        logits = pointer(a[arg.logits] + token * a[arg.stride] * size)
        scores, ranked, taken = stack(MOST_EXPERTS), stack(MOST_EXPERTS), stack(MOST_EXPERTS)
        highest = _NEVER
        for i in range(count):
            ranked[i] = scores[i] = load(logits, i)
            taken[i] = float32(0)
            highest = max(highest, scores[i])
        for i in range(count, (count + LANES - 1) // LANES * LANES):
            scores[i] = highest
        total = float32(1)
        if is_sigmoid:
            sigmoids(address_of(scores), address_of(scores), count)
            for i in range(count):
                ranked[i] = scores[i]
        elif of_all:
            total = exponentials(address_of(scores), count, highest)
        if a[arg.correction] != 0:
            for i in range(count):
                ranked[i] = scores[i] + float_pointer(a[arg.correction])[i]
        if a[arg.groups_kept] < a[arg.num_groups]:
            drop_groups(ranked, count, a[arg.num_groups], a[arg.groups_kept], a[arg.sums_best_two])
        chosen = int_pointer(a[arg.chosen] + token * top_k * 4)
        weights = float_pointer(a[arg.weights] + token * top_k * 4)
        room = stack(MOST_CHOSEN)
        for k in range(top_k):
            expert = best(ranked, taken, count)
            chosen[k], room[k] = int32(expert), scores[expert]
        if not is_sigmoid and not of_all:
            for k in range(top_k, (top_k + LANES - 1) // LANES * LANES):
                room[k] = room[0]
            total = exponentials(address_of(room), top_k, room[0])
        if a[arg.normalized] != 0:
            total = _LEAST_SUM
            for k in range(top_k):
                total += room[k]
        scaling = float32(float64_of(a[arg.scaling]))
        for k in range(top_k):
            weights[k] = room[k] / total * scaling

    return work


@per_item
def make_sort() -> Any:
    """Makes a kernel that sorts pairs of a token and an expert by expert, in the order of tokens. It has one item.

    Arguments of the kernel: chosen, int32[pairs]; pairs; top_k; experts; most rows of a block; plan; pairs' tokens;
    pairs' places; int32[experts] for its own use; int64[experts], to which it adds the number of each expert's pairs;
    int32[experts], the place of each expert among those that are here, -1 for one that is not.
    """
    arg = places("chosen num_pairs top_k num_experts most_rows plan pairs places starts counts here")

    @njit
    def work(a: Any, _item: int, _thread: int) -> None:
        chosen, starts, plan = int_pointer(a[arg.chosen]), int_pointer(a[arg.starts]), int_pointer(a[arg.plan])
        counts, pairs, found = long_pointer(a[arg.counts]), int_pointer(a[arg.pairs]), int_pointer(a[arg.places])
        num_experts, most_rows, top_k = a[arg.num_experts], a[arg.most_rows], a[arg.top_k]
        here = int_pointer(a[arg.here])
        for expert in range(num_experts):
            starts[expert] = 0
        for pair in range(a[arg.num_pairs]):
            starts[chosen[pair]] += int32(1)
        num_blocks, first = 0, 0
        for expert in range(num_experts):
            count = starts[expert]
            counts[expert] += count
            if here[expert] < 0:
                starts[expert] = int32(-1)
                continue
            blocks = (count + most_rows - 1) // most_rows
            for block in range(blocks):
                begin, end = block * count // blocks, (block + 1) * count // blocks
                at = PLAN_HEAD + num_blocks * PLAN_WORDS
                plan[at], plan[at + 1], plan[at + 2] = here[expert], int32(first + begin), int32(end - begin)
                num_blocks += 1
            starts[expert] = int32(first)
            first += count
        plan[0], plan[1] = int32(num_blocks), int32(first)
        for pair in range(a[arg.num_pairs]):
            place = starts[chosen[pair]]
            if place < 0:
                found[pair] = int32(-1)
                continue
            starts[chosen[pair]] = place + int32(1)
            pairs[place], found[pair] = int32(pair // top_k), place

    return work


@per_item
def make_combine(dtype: str) -> Any:
    """Makes a kernel of the weighted sum of what each token's experts that are here made of it, in the order of the
    choice, in float32; with what the shared expert made of it, weighed by the sigmoid of a number if there is one. An
    item is a token.

    Arguments of the kernel: results by pairs and the elements from row to row; places; weights; top_k; target and the
    elements from row to row; width, with room in all rows for whole vectors; shared results, or 0, and the elements
    from row to row; logits of the shared expert's gate, or 0, and the elements from row to row.
    """
    element = ELEMENTS[dtype]
    load_vector, store_vector, size = element.load_vector, element.store_vector, element.size
    load, pointer = element.load, element.pointer
    arg = places("fed stride places weights top_k target target_stride width shared shared_stride gate gate_stride")

    @njit(error_model="numpy")
    def sigmoid(value: float) -> float:
        room = stack(LANES)
        one = spread(float32(1))
        store_floats(address_of(room), divide(one, one + exp2(spread(value * float32(-LOG2_E)))))
        return room[0]

    @njit
    def work(a: Any, token: int, _thread: int) -> None:
        top_k = a[arg.top_k]
        found = int_pointer(a[arg.places] + token * top_k * 4)
        weights = float_pointer(a[arg.weights] + token * top_k * 4)
        shared = a[arg.shared] + token * a[arg.shared_stride] * size
        of_shared = float32(1)
        if a[arg.gate] != 0:
            of_shared = sigmoid(load(pointer(a[arg.gate] + token * a[arg.gate_stride] * size), 0))
        target = a[arg.target] + token * a[arg.target_stride] * size
        for at in range(0, a[arg.width] * size, LANES * size):
            total = spread(float32(0))
            for k in range(top_k):
                if found[k] < 0:
                    continue
                row = a[arg.fed] + found[k] * a[arg.stride] * size
                total = multiply_add(load_vector(row + at), spread(weights[k]), total)
            if a[arg.shared] != 0:
                total = multiply_add(load_vector(shared + at), spread(of_shared), total)
            store_vector(target + at, total)

    return work


@per_item
def make_widen(dtype: str) -> Any:
    """Makes a kernel that converts rows to float32. An item is a row.

    Arguments of the kernel: x, target, each followed by the elements from row to row in it; width.
    """
    element = ELEMENTS[dtype]
    load, pointer, load_vector, size = element.load, element.pointer, element.load_vector, element.size
    arg = places("x stride target target_stride width")

    @njit
    def work(a: Any, row: int, _thread: int) -> None:
        x, target = a[arg.x] + row * a[arg.stride] * size, a[arg.target] + row * a[arg.target_stride] * 4
        whole = a[arg.width] // LANES * LANES
        for i in range(0, whole, LANES):
            store_floats(target + i * 4, load_vector(x + i * size))
        for i in range(whole, a[arg.width]):
            float_pointer(target)[i] = load(pointer(x), i)

    return work
