"""Ranks of tokens by their logits, in torch's operations: on every device the same."""

import torch
from torch import Tensor


def ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the rank of each row's token among [N, vocab] logits: int64[N] -> int32[N], 1 for the likeliest.

    As in vLLM, tokens with an equal logit count too, so a token that is none of the K best has a rank above K.
    """
    own = logits.gather(1, tokens[:, None])
    return (logits >= own).sum(dim=1).to(torch.int32)
