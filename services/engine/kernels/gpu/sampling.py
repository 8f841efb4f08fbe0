"""Sampling on CUDA: computes tokens from logits like `services.engine.runner.cpu.sampler`, without a wait on the host.

Sampling takes two launches. The first looks at every tile of every row in a program of its own, so that one row
occupies many; the second merges each row's tiles. A row's token depends on its own logits, parameters, seed and
position, never on its neighbours in the batch nor on the memory between rows.

A token is drawn by a race (the Gumbel-max trick, for instance Maddison et al. 2014, arXiv 1411.0030): each token has an
exponential number that depends on (seed, position, token id) alone, and the token with the lowest quotient of this
number and its weight wins. So filters only decide which tokens take part, and no sum depends on an order. The same seed
draws other tokens than on a CPU.

Resolution: the numbers come from 32 random bits, so a token's probability is right to about 2**-32, and a token that is
many times less likely than that is never drawn. Tokens with equal race times, within about 1 part in a million, may
come in either order.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from services.engine.kernels.gpu.sampling_choice import choose_draw, choose_greedy
from services.engine.kernels.gpu.sampling_edits import ENTRIES, add_biases, add_penalties
from services.engine.kernels.gpu.sampling_logprobs import choose_likeliest
from services.engine.kernels.gpu.sampling_scan import scan_draw, scan_greedy, scan_softmax
from services.engine.kernels.gpu.sampling_search import LIST_SIZE
from services.engine.kernels.gpu.sampling_tiles import GROUP, GROUPS, TILE, shift_of


@dataclass(slots=True, eq=False)
class DeviceEdits:
    """`LogitEdits` on the device: B biases, C penalties, N rows."""

    bias_rows: Tensor  # int64[B]
    bias_tokens: Tensor  # int64[B]; a row may have a token twice
    bias: Tensor  # float32[B], added; -inf: the token must not be chosen
    count_rows: Tensor  # int64[C]
    count_tokens: Tensor  # int64[C], no token twice in a row
    counts: Tensor  # float32[C]
    repetition: Tensor  # float32[N]
    frequency: Tensor  # float32[N]
    presence: Tensor  # float32[N]


@dataclass(slots=True, eq=False)
class DeviceSampling:
    """Parameters of N rows, on the device, and what the host knows of all of them."""

    temperature: Tensor  # float32[N]; 0: greedy
    top_k: Tensor  # int32[N]; below 1: off
    top_p: Tensor  # float32[N], above 0; 1: off
    min_p: Tensor  # float32[N], 0 to 1; 0: off
    seed: Tensor  # int64[N], the bits of a uint64
    position: Tensor  # int64[N]: index in its sequence of the token to be sampled
    any_filtered: bool  # whether a row with a temperature has top_k, top_p or min_p


@dataclass(slots=True, eq=False)
class DeviceLogprobs:
    """`StepLogprobs` on the device."""

    sampled: Tensor  # float32[N]
    top_ids: Tensor  # int32[N, K], best first; of equals the lowest id first
    top: Tensor  # float32[N, K]


def edit_logits(logits: Tensor, edits: DeviceEdits) -> None:
    """Adds biases, then penalties, in place. Logits: float32[N, vocab]; rows may lie apart.

    Must not be captured in a CUDA graph, whose launches would not follow the number of edits.
    """
    if len(edits.bias):
        add_biases[(triton.cdiv(len(edits.bias), ENTRIES),)](
            logits, logits.stride(0), len(edits.bias), edits.bias_rows, edits.bias_tokens, edits.bias
        )
    if len(edits.counts):
        add_penalties[(triton.cdiv(len(edits.counts), ENTRIES),)](
            logits,
            logits.stride(0),
            len(edits.counts),
            edits.count_rows,
            edits.count_tokens,
            edits.counts,
            edits.repetition,
            edits.frequency,
            edits.presence,
        )


def greedy(logits: Tensor, out: Tensor, *, edited: bool = False) -> None:
    """Writes the first of each row's highest logits: float32, bfloat16 or float16 [N, vocab] -> int32[N].

    Rows may lie apart; a row's logits are contiguous. A row with a logit that is not finite gets -1. edited: logits may
    be -inf; only NaN counts as not finite.
    """
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return
    num_tiles = triton.cdiv(vocab, TILE)
    tops = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    scan_greedy[(num_tiles, num_rows)](logits, logits.stride(0), vocab, tops, tokens, edited)
    choose_greedy[(num_rows,)](vocab, num_tiles, tops, tokens, out, triton.next_power_of_2(num_tiles), num_warps=1)


def draw(logits: Tensor, params: DeviceSampling, out: Tensor, *, edited: bool = False) -> None:
    """Writes a token for each row: float32, bfloat16 or float16 [N, vocab] -> int32[N].

    Rows may lie apart; a row's logits are contiguous. Rows with temperature 0 are greedy. For others a token weighs
    exp((logit - highest logit) / temperature), and the filters keep, in this order: tokens that weigh at least min_p;
    of these the top_k best ones; of those the smallest number of best ones whose weight reaches top_p of theirs. Tokens
    that tie with the last one that top_k or top_p keeps are kept as well; but if that is the best one, the row is
    greedy. edited, and logits that are not finite: see `greedy`.
    """
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return
    num_tiles, device, filtered = triton.cdiv(vocab, TILE), logits.device, params.any_filtered
    tops = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    amounts = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    tokens = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    group_tops, lists = _search_memory(num_rows if filtered else 0, num_tiles, device)
    all_groups = triton.next_power_of_2(triton.cdiv(vocab, GROUP.value))
    settings = params.temperature, params.top_k, params.top_p, params.min_p, params.seed, params.position
    found = tops, amounts, tokens, group_tops
    scan_draw[(num_tiles, num_rows)](logits, logits.stride(0), vocab, *settings, *found, filtered, edited, num_warps=8)
    choose_draw[(num_rows,)](
        logits,
        logits.stride(0),
        vocab,
        num_tiles,
        *settings,
        *found,
        group_tops.stride(0),
        lists,
        out,
        filtered,
        shift_of(logits.dtype),
        triton.next_power_of_2(num_tiles),
        all_groups,
        num_warps=_search_warps(all_groups) if filtered else 1,
    )


def logprobs(logits: Tensor, chosen: Tensor, widths: Tensor, width: int) -> DeviceLogprobs:
    """Returns logprobs under softmax(logits): of the chosen tokens and of the K = min(width, vocab) likeliest ones.

    logits: float32, bfloat16 or float16 [N, vocab]; rows may lie apart, a row's logits are contiguous. chosen:
    int32[N]. widths: int32[N]; rows with a width below 0 get zeros. `width` is the highest of them, or 0. In a row with
    a logit that is not finite, the chosen token's logprob is NaN.
    """
    num_rows, vocab = logits.shape
    width, device = min(width, vocab), logits.device
    sampled = torch.empty(num_rows, dtype=torch.float32, device=device)
    top_ids = torch.empty(num_rows, width, dtype=torch.int32, device=device)
    top = torch.empty(num_rows, width, dtype=torch.float32, device=device)
    if num_rows == 0:
        return DeviceLogprobs(sampled, top_ids, top)
    num_tiles = triton.cdiv(vocab, TILE)
    tops = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    amounts = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    group_tops, lists = _search_memory(num_rows, num_tiles, device)
    all_groups = triton.next_power_of_2(triton.cdiv(vocab, GROUP.value))
    scan_softmax[(num_tiles, num_rows)](logits, logits.stride(0), vocab, widths, tops, amounts, group_tops)
    choose_likeliest[(num_rows,)](
        logits,
        logits.stride(0),
        vocab,
        num_tiles,
        chosen,
        widths,
        width,
        tops,
        amounts,
        group_tops,
        group_tops.stride(0),
        lists,
        sampled,
        top_ids,
        top,
        shift_of(logits.dtype),
        triton.next_power_of_2(num_tiles),
        all_groups,
        num_warps=_search_warps(all_groups),
    )
    return DeviceLogprobs(sampled, top_ids, top)


def _search_memory(num_rows: int, num_tiles: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocates the highest logits of groups, float32[N, groups], and scratch memory for lists, int32[N, LIST_SIZE]."""
    group_tops = torch.empty(num_rows, num_tiles * GROUPS.value, dtype=torch.float32, device=device)
    return group_tops, torch.empty(num_rows, LIST_SIZE, dtype=torch.int32, device=device)


def _search_warps(all_groups: int) -> int:
    """Returns the warps of a program that searches a row, so that its tensors fit into registers, two programs at a
    time.
    """
    return 16 if all_groups <= 4096 else 32
