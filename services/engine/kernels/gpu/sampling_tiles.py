"""How kernels of the sampler look at a row of logits: in tiles of GROUPS groups of GROUP tokens each.

A row's logits are next to each other. Tiles are for programs of their own, so that a single row occupies many of them;
the highest logit of each group is what a search needs to find the few groups that matter to it.

Order is that of a logit's key: an int32 that is larger where the logit is. A number that was widened to float32 has
`SHIFT` low bits that say nothing; keys leave them out, so that a bisection of keys ends sooner.
"""

import torch
import triton
import triton.language as tl

GROUP = tl.constexpr(64)
GROUPS = tl.constexpr(64)
NO_KEY = tl.constexpr(-(2**31))  # below every number's
TILE = GROUP.value * GROUPS.value
MIN_TEMPERATURE = tl.constexpr(1e-5)  # anything colder is this cold

_NO_TOKEN = tl.constexpr(2**31 - 1)
_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


def shift_of(dtype: torch.dtype) -> int:
    """SHIFT for logits of this dtype."""
    return _SHIFTS[dtype]


@triton.jit
def load_tile(row: tl.tensor, tile: tl.tensor, vocab: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """float32 and int32[GROUPS, GROUP]: logits and token ids; -inf from `vocab` on."""
    groups = tile * GROUPS + tl.arange(0, GROUPS)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(row + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32), tokens


@triton.jit
def highest(tile: tl.tensor) -> tl.tensor:
    """The largest of a two-dimensional tensor."""
    return tl.max(tl.max(tile, axis=1), axis=0)


@triton.jit
def lowest(tile: tl.tensor) -> tl.tensor:
    """The smallest of a two-dimensional tensor."""
    return tl.min(tl.min(tile, axis=1), axis=0)


@triton.jit
def total(tile: tl.tensor) -> tl.tensor:
    """The sum of a two-dimensional tensor."""
    return tl.sum(tl.sum(tile, axis=1), axis=0)


@triton.jit
def first_in_tile(chosen: tl.tensor, tokens: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """The lowest of the two-dimensional `tokens` that are chosen. The last token if none is: only NaN does that."""
    return tl.minimum(lowest(tl.where(chosen, tokens, _NO_TOKEN)), vocab - 1)


@triton.jit
def first(chosen: tl.tensor, tokens: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """The same for tensors of one dimension."""
    return tl.minimum(tl.min(tl.where(chosen, tokens, _NO_TOKEN), axis=0), vocab - 1)


@triton.jit
def coldness(temperature: tl.tensor) -> tl.tensor:
    """What differences of logits are multiplied by."""
    return 1.0 / tl.maximum(temperature, MIN_TEMPERATURE)


@triton.jit
def below(logits: tl.tensor, top: tl.tensor, cold: tl.tensor) -> tl.tensor:
    """Logarithms of weights: 0 for what equals `top`, infinite or not, less for what is below."""
    base = tl.where(top > float("-inf"), top, 0.0)  # where all are -inf, no difference of infinities
    return tl.where(logits == top, 0.0, (logits - base) * cold)


@triton.jit
def key_of(logits: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """int32, in the order of the float32 logits; the same for 0 and -0."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def logit_of(key: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """The float32 that has this int32 key."""
    sign = key >> 31
    bits = (key << SHIFT) | (sign & ((1 << SHIFT) - 1))
    return (bits ^ (sign & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
