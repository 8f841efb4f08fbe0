# mypy: disable-error-code="no-untyped-def"
# A kernel has no Python types.
"""The MLPs of a layer's experts in Triton: products grouped by expert, whose work items lie in device memory.

Pairs of a token and an expert are counted by expert and put in that order; a program finds in the counts which
expert's block of pairs is its own, and one beyond the last block does nothing. So a launch depends on the number of
tokens alone, whatever they choose, and a CUDA graph holds it:

    counts   int32[E]       pairs of each expert
    order    int32[T * K]   pairs by expert; pair p is token p // K's choice p % K. Pairs of one expert have any order
    inner    [T * K, width] in that order
    outer    [T * K, hidden], by pair: summed for each token in the order of its choice, in float32
    tallied  int64[E]       pairs of each expert in all steps so far, without those of padding; maybe absent
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.kernels.expert_tally import ExpertTally
from services.engine.kernels.gpu.casts import cast, through
from services.engine.kernels.gpu.launch import dot_dtype

_PAIRS = 128  # of a program that counts or places pairs
_COLUMNS = 1024  # of a program that sums


class ExpertStacks(NamedTuple):
    """The weights of all experts of a layer, one behind the other, contiguous."""

    gate_up: Tensor  # [E, 2 * width, hidden], gate first
    down: Tensor  # [E, hidden, width]
    gate_up_bias: Tensor | None = None  # [E, 2 * width]
    down_bias: Tensor | None = None  # [E, hidden]


class Tile(NamedTuple):
    """The part of a product that one program computes, and how it does."""

    rows: int
    columns: int
    depth: int  # of a step
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(chosen, counts, ranks, tallied, num_tokens, num_pairs, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Counts each expert's pairs, and gives each pair a number among them. Takes pairs of padding from what is tallied,
    to which `place_kernel` adds all of them.
    """
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    present = pairs < num_pairs
    expert = tl.load(chosen + pairs, mask=present, other=0)
    tl.store(ranks + pairs, tl.atomic_add(counts + expert, 1, mask=present), mask=present)
    if num_tokens is not None:
        is_padding = present & (pairs >= tl.load(num_tokens) * TOP_K)
        tl.atomic_add(tallied + expert, tl.full((BLOCK,), -1, dtype=tl.int64), mask=is_padding)


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(
    chosen, counts, ranks, order, tallied, num_pairs, NUM: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes each pair to its place in the order by expert. Adds the counts to what is tallied."""
    pairs, experts = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, EXPERTS)
    present = pairs < num_pairs
    sizes = tl.load(counts + experts, mask=experts < NUM, other=0)
    expert = tl.load(chosen + pairs, mask=present, other=0)
    if tallied is not None:
        by_first = (experts < NUM) & (tl.program_id(0) == 0)
        tl.store(tallied + experts, tl.load(tallied + experts, mask=by_first, other=0) + sizes, mask=by_first)
    before = tl.sum(tl.where(experts[None, :] < expert[:, None], sizes[None, :], 0), 1)
    rank = tl.load(ranks + pairs, mask=present, other=0)
    tl.store(order + before + rank, pairs, mask=present)


@triton.jit
def find_block(counts, block, NUM: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Returns the expert of a block of ROWS pairs, its first place, and the end of the expert's places.

    The expert is NUM or more if there are fewer blocks.
    """
    experts = tl.arange(0, EXPERTS)
    sizes = tl.load(counts + experts, mask=experts < NUM, other=0)
    blocks = (sizes + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
    is_before = experts < expert
    first = tl.sum(tl.where(is_before, sizes, 0), 0)
    number = block - tl.sum(tl.where(is_before, blocks, 0), 0)
    size = tl.sum(tl.where(experts == expert, sizes, 0), 0)
    return expert, first + number * ROWS, first + size


@triton.jit
def _multiply(acc, a, b, present, wanted, DEPTH: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr):
    """Adds to acc the product of rows at `a` [ROWS, 1] with rows at `b` [COLUMNS, 1]."""
    for start in range(0, DEPTH, STEP):
        depths = start + tl.arange(0, STEP)[None, :]
        inside = depths < DEPTH
        left = tl.load(a + depths, mask=present[:, None] & inside, other=0.0)
        right = tl.load(b + depths, mask=wanted[:, None] & inside, other=0.0)
        acc = tl.dot(left.to(DOT), tl.trans(right.to(DOT)), acc, input_precision="ieee")
    return acc


@triton.jit
def glu(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr, dtype: tl.constexpr):
    """Returns SiLU(gate) * up, with a LIMIT its clamped form, rounded to the dtype where torch's operations round."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1
        return through(gate / (1 + tl.exp(-ALPHA * gate)), dtype) * through(up, dtype)
    return through(gate / (1 + tl.exp(-gate)), dtype) * up


@triton.jit(do_not_specialize=["num_blocks"])
def gate_up_kernel(
    x,
    weight,
    bias,
    order,
    counts,
    inner,
    stride,
    num_blocks,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Computes some columns of SiLU(gate) * up, with a LIMIT of its clamped form, for a block of an expert's pairs."""
    dtype: tl.constexpr = x.dtype.element_ty
    expert, first, end = find_block(counts, tl.program_id(0) % num_blocks, NUM, EXPERTS, ROWS)
    if expert < NUM:
        places = first + tl.arange(0, ROWS)
        present = places < end
        tokens = tl.load(order + places, mask=present, other=0) // TOP_K
        columns = tl.program_id(0) // num_blocks * COLUMNS + tl.arange(0, COLUMNS)
        wanted = columns < WIDTH
        a = x + tokens.to(tl.int64)[:, None] * stride
        b = weight + expert.to(tl.int64) * (2 * WIDTH * HIDDEN) + columns[:, None] * HIDDEN
        gate, up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32), tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, HIDDEN, STEP):
            depths = start + tl.arange(0, STEP)[None, :]
            inside = depths < HIDDEN
            left = tl.load(a + depths, mask=present[:, None] & inside, other=0.0).to(DOT)
            of_gate = tl.load(b + depths, mask=wanted[:, None] & inside, other=0.0)
            of_up = tl.load(b + WIDTH * HIDDEN + depths, mask=wanted[:, None] & inside, other=0.0)
            gate = tl.dot(left, tl.trans(of_gate.to(DOT)), gate, input_precision="ieee")
            up = tl.dot(left, tl.trans(of_up.to(DOT)), up, input_precision="ieee")
        if bias is not None:
            biases = bias + expert.to(tl.int64) * (2 * WIDTH) + columns
            gate += tl.load(biases, mask=wanted, other=0.0).to(tl.float32)[None, :]
            up += tl.load(biases + WIDTH, mask=wanted, other=0.0).to(tl.float32)[None, :]
        gate, up = through(gate, dtype), through(up, dtype)
        activated = glu(gate, up, LIMIT, ALPHA, dtype)
        into = inner + places.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        tl.store(into, cast(activated, dtype), mask=present[:, None] & wanted[None, :])


@triton.jit(do_not_specialize=["num_blocks"])
def down_kernel(
    inner,
    weight,
    bias,
    order,
    counts,
    outer,
    num_blocks,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Computes some columns of what an expert makes of a block of its pairs."""
    dtype: tl.constexpr = inner.dtype.element_ty
    expert, first, end = find_block(counts, tl.program_id(0) % num_blocks, NUM, EXPERTS, ROWS)
    if expert < NUM:
        places = first + tl.arange(0, ROWS)
        present = places < end
        columns = tl.program_id(0) // num_blocks * COLUMNS + tl.arange(0, COLUMNS)
        wanted = columns < HIDDEN
        a = inner + places.to(tl.int64)[:, None] * WIDTH
        b = weight + expert.to(tl.int64) * (HIDDEN * WIDTH) + columns[:, None] * WIDTH
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        acc = _multiply(acc, a, b, present, wanted, WIDTH, STEP, DOT)
        if bias is not None:
            acc += tl.load(bias + expert.to(tl.int64) * HIDDEN + columns, mask=wanted, other=0.0).to(tl.float32)[
                None, :
            ]
        pairs = tl.load(order + places, mask=present, other=0)
        into = outer + pairs.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
        tl.store(into, cast(acc, dtype), mask=present[:, None] & wanted[None, :])


@triton.jit
def sum_kernel(outer, weights, out, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    """Computes the weighted sums of some columns of a token's experts."""
    dtype: tl.constexpr = out.dtype.element_ty
    parts: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    token = (tl.program_id(0) // parts).to(tl.int64)
    columns = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    wanted = columns < HIDDEN
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for choice in range(TOP_K):
        pair = token * TOP_K + choice
        made = tl.load(outer + pair * HIDDEN + columns, mask=wanted, other=0.0).to(tl.float32)
        total += made * tl.load(weights + pair)
    tl.store(out + token * HIDDEN + columns, cast(total, dtype), mask=wanted)


def grouped_mlp(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    stacks: ExpertStacks,
    swiglu: tuple[float, float] | None = None,
    tally: ExpertTally | None = None,
) -> Tensor:
    """Returns the weighted sum of what each token's experts make of it, [T, hidden].

    x: [T, hidden], whose rows may lie apart; chosen: int[T, K], different experts; weights: float32[T, K].
    swiglu: limit and alpha of `clamped_swiglu`; None for SiLU(gate) * up. tally: gets the pairs of each expert.
    """
    (num_tokens, top_k), (num_experts, hidden, width) = chosen.shape, stacks.down.shape
    num_pairs, experts = num_tokens * top_k, triton.next_power_of_2(num_experts)
    counts, order = sort_pairs(chosen, num_experts, tally)
    first, second = _tiles(num_pairs, num_experts)
    num_blocks = min(num_pairs, triton.cdiv(num_pairs, first.rows) + num_experts - 1)
    inner, outer = (torch.empty((num_pairs, size), dtype=x.dtype, device=x.device) for size in (width, hidden))
    limit, alpha = swiglu or (0.0, 0.0)
    gate_up_kernel[(num_blocks * triton.cdiv(width, first.columns),)](
        x,
        stacks.gate_up,
        stacks.gate_up_bias,
        order,
        counts,
        inner,
        x.stride(0),
        num_blocks,
        LIMIT=limit,
        ALPHA=alpha,
        TOP_K=top_k,
        WIDTH=width,
        HIDDEN=hidden,
        NUM=num_experts,
        EXPERTS=experts,
        **_constants(first, x.dtype),
    )
    down_kernel[(num_blocks * triton.cdiv(hidden, second.columns),)](
        inner,
        stacks.down,
        stacks.down_bias,
        order,
        counts,
        outer,
        num_blocks,
        WIDTH=width,
        HIDDEN=hidden,
        NUM=num_experts,
        EXPERTS=experts,
        **_constants(second, x.dtype),
    )
    return sum_pairs(outer, weights)


def sort_pairs(chosen: Tensor, num_experts: int, tally: ExpertTally | None) -> tuple[Tensor, Tensor]:
    """Returns counts and order of the pairs of int[T, K], see above."""
    num_pairs, experts = chosen.numel(), triton.next_power_of_2(num_experts)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=chosen.device)
    ranks, order = (torch.empty(num_pairs, dtype=torch.int32, device=chosen.device) for _ in range(2))
    grid = (triton.cdiv(num_pairs, _PAIRS),)
    tallied, num_tokens = (None, None) if tally is None else tally
    count_kernel[grid](
        chosen, counts, ranks, tallied, num_tokens, num_pairs, TOP_K=chosen.shape[1], BLOCK=_PAIRS, num_warps=4
    )
    place_kernel[grid](
        chosen, counts, ranks, order, tallied, num_pairs, NUM=num_experts, EXPERTS=experts, BLOCK=_PAIRS, num_warps=4
    )
    return counts, order


def sum_pairs(outer: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted sums of each token's pairs, [T, hidden]. outer: [T * K, hidden]; weights: float32[T, K]."""
    (num_tokens, top_k), hidden = weights.shape, outer.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=outer.dtype, device=outer.device)
    columns = min(_COLUMNS, triton.next_power_of_2(hidden))
    sum_kernel[(num_tokens * triton.cdiv(hidden, columns),)](
        outer, weights, out, HIDDEN=hidden, TOP_K=top_k, COLUMNS=columns, num_warps=4
    )
    return out


def _tiles(num_pairs: int, num_experts: int) -> tuple[Tile, Tile]:
    """Returns the tiles of both products, with the same rows: about as many as an expert has pairs."""
    of_expert = num_pairs / num_experts
    if of_expert <= 16:
        return Tile(16, 64, 128, 4, 3), Tile(16, 64, 128, 4, 3)
    if of_expert <= 64:
        return Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3)
    return Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3)


def _constants(tile: Tile, dtype: torch.dtype) -> dict[str, object]:
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "STEP": tile.depth,
        "DOT": dot_dtype(dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
