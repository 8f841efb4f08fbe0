"""The pairs of a token and an expert that a layer's experts computed, as kernels of either device count them."""

from typing import NamedTuple

from torch import Tensor


class ExpertTally(NamedTuple):
    """The memory in which a layer's experts count. Both tensors are on their device."""

    counts: Tensor  # int64[experts], contiguous: pairs of each expert so far
    num_tokens: Tensor | None = None  # int32[1]: of a step's tokens the first so many count; None: all do
