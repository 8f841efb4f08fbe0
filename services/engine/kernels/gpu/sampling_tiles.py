"""The parts in which the sampler's kernels read a row of logits: tiles of GROUPS groups of GROUP tokens each.

A row's logits are contiguous. Each tile has a program of its own, so that a single row occupies many; by the highest
logit of each group, a search finds the few groups that matter.

Logits are ordered by their keys: a key is an int32 that is larger if the logit is. A logit that was widened to float32
has `SHIFT` low bits that carry nothing; keys leave them out, so that a bisection of keys ends sooner.
"""

import torch
import triton
import triton.language as tl

GROUP = tl.constexpr(64)
GROUPS = tl.constexpr(64)
NO_KEY = tl.constexpr(-(2**31))  # below every number's key
TILE = GROUP.value * GROUPS.value
MIN_TEMPERATURE = tl.constexpr(1e-5)  # anything colder is this cold

_NO_TOKEN = tl.constexpr(2**31 - 1)
_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


def shift_of(dtype: torch.dtype) -> int:
    """Returns SHIFT for logits of this dtype."""
    return _SHIFTS[dtype]


@triton.jit
def load_tile(row: tl.tensor, tile: tl.tensor, vocab: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Loads a tile's logits and token ids, float32 and int32[GROUPS, GROUP]; logits are -inf from `vocab` on."""
    groups = tile * GROUPS + tl.arange(0, GROUPS)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(row + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32), tokens


@triton.jit
def without_strange(
    tile: tl.tensor, tokens: tl.tensor, vocab: tl.tensor, EDITED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns a tile with 0 in the place of logits that are not finite, and whether there are any, as 0 or 1.

    Edited logits may be -inf, and a row that was not finite before has NaN. Those behind the vocabulary are -inf.
    """
    if EDITED:
        strange = tile != tile
    else:
        strange = (tokens < vocab) & ((tl.abs(tile) < float("inf")) == 0)  # also for NaN
    return tl.where(strange, 0.0, tile), tl.max(tl.max(strange.to(tl.int32), axis=1), axis=0)


@triton.jit
def marked(amount: tl.tensor, strange: tl.tensor) -> tl.tensor:
    """Returns a tile's number, or NaN if a logit of the tile is not finite."""
    return tl.where(strange > 0, float("nan"), amount)


@triton.jit
def highest(tile: tl.tensor) -> tl.tensor:
    """Returns the largest element of a two-dimensional tensor."""
    return tl.max(tl.max(tile, axis=1), axis=0)


@triton.jit
def lowest(tile: tl.tensor) -> tl.tensor:
    """Returns the smallest element of a two-dimensional tensor."""
    return tl.min(tl.min(tile, axis=1), axis=0)


@triton.jit
def total(tile: tl.tensor) -> tl.tensor:
    """Returns the sum of a two-dimensional tensor."""
    return tl.sum(tl.sum(tile, axis=1), axis=0)


@triton.jit
def first_in_tile(chosen: tl.tensor, tokens: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """Returns the lowest of the two-dimensional `tokens` that are chosen. If none is, the last token."""
    return tl.minimum(lowest(tl.where(chosen, tokens, _NO_TOKEN)), vocab - 1)


@triton.jit
def first(chosen: tl.tensor, tokens: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """Does the work of `first_in_tile` for tensors of one dimension."""
    return tl.minimum(tl.min(tl.where(chosen, tokens, _NO_TOKEN), axis=0), vocab - 1)


@triton.jit
def coldness(temperature: tl.tensor) -> tl.tensor:
    """Returns the factor on differences of logits, 1 / temperature."""
    return 1.0 / tl.maximum(temperature, MIN_TEMPERATURE)


@triton.jit
def below(logits: tl.tensor, top: tl.tensor, cold: tl.tensor) -> tl.tensor:
    """Returns logarithms of weights: 0 for logits equal to `top`, infinite or not, and less for lower ones."""
    base = tl.where(top > float("-inf"), top, 0.0)  # avoids a difference of infinities if all are -inf
    return tl.where(logits == top, 0.0, (logits - base) * cold)


@triton.jit
def key_of(logits: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Returns int32 keys in the order of the float32 logits; 0 and -0 have one key."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def logit_of(key: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Returns the float32 that has this int32 key."""
    sign = key >> 31
    bits = (key << SHIFT) | (sign & ((1 << SHIFT) - 1))
    return (bits ^ (sign & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
