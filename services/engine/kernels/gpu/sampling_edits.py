"""Biases and penalties: changes to single logits, with a program for each ENTRIES of them."""

import triton
import triton.language as tl

ENTRIES = 256  # entries of a program

_ENTRIES = tl.constexpr(ENTRIES)


@triton.jit(do_not_specialize=["num_entries"], do_not_specialize_on_alignment=["rows", "tokens", "bias"])
def add_biases(
    logits: tl.tensor,  # float32[N, vocab], rows `stride` apart
    stride: tl.tensor,
    num_entries: tl.tensor,
    rows: tl.tensor,  # int64[num_entries]
    tokens: tl.tensor,  # int64[num_entries]
    bias: tl.tensor,  # float32[num_entries]
) -> None:
    """Adds each bias. Entries of one logit add up, in any order."""
    entries = tl.program_id(0) * _ENTRIES + tl.arange(0, _ENTRIES)
    here = entries < num_entries
    places = tl.load(rows + entries, mask=here, other=0) * stride + tl.load(tokens + entries, mask=here, other=0)
    tl.atomic_add(logits + places, tl.load(bias + entries, mask=here, other=0.0), mask=here, sem="relaxed")


@triton.jit(
    do_not_specialize=["num_entries"],
    do_not_specialize_on_alignment=["rows", "tokens", "counts", "repetition", "frequency", "presence"],
)
def add_penalties(
    logits: tl.tensor,  # float32[N, vocab], rows `stride` apart
    stride: tl.tensor,
    num_entries: tl.tensor,
    rows: tl.tensor,  # int64[num_entries]
    tokens: tl.tensor,  # int64[num_entries]
    counts: tl.tensor,  # float32[num_entries]
    repetition: tl.tensor,  # float32[N]
    frequency: tl.tensor,  # float32[N]
    presence: tl.tensor,  # float32[N]
) -> None:
    """Applies penalties as `LogitEdits` defines them. No two entries are of one logit."""
    entries = tl.program_id(0) * _ENTRIES + tl.arange(0, _ENTRIES)
    here = entries < num_entries
    row = tl.load(rows + entries, mask=here, other=0)
    places = logits + row * stride + tl.load(tokens + entries, mask=here, other=0)
    count = tl.load(counts + entries, mask=here, other=0.0)
    factor = tl.load(repetition + row, mask=here, other=1.0)
    value = tl.load(places, mask=here, other=0.0)
    value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
    value -= tl.load(frequency + row, mask=here, other=0.0) * count
    value -= tl.where(count > 0, tl.load(presence + row, mask=here, other=0.0), 0.0)
    tl.store(places, value, mask=here)
