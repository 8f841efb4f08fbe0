"""Ranks of tokens by their logits, and the tokens in their order, in torch's operations: on every device the same."""

import torch
from torch import Tensor


def ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the rank of each row's token among [N, vocab] logits: int64[N] -> int32[N], 1 for the likeliest.

    As in vLLM, tokens with an equal logit count too, so a token that is none of the K best has a rank above K.
    """
    own = logits.gather(1, tokens[:, None])
    return (logits >= own).sum(dim=1).to(torch.int32)


def likeliest_of(logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Returns the ids and the logprobs, int32[K] and float32[K], of the K = min(number, vocab) likeliest tokens under
    softmax of [vocab] logits: the best first, and of equals the lowest id.
    """
    values, ids = logits.to(torch.float32).log_softmax(dim=-1).sort(descending=True, stable=True)
    return ids[:number].to(torch.int32), values[:number]
