"""Sums of hidden states, for the embeddings of prompts: on every device in the same order, and so the same."""

import torch
from torch import Tensor

from services.engine.runner.base import PooledTokens


def pooled_sums(hidden: Tensor, pooled: PooledTokens) -> Tensor:
    """Adds up the hidden states of P prompts, [Q, size], in float32. Returns float32[P, size], on the same device."""
    sums = torch.zeros(len(pooled.starts) - 1, hidden.shape[1], device=hidden.device)
    for part, start, end in zip(sums, pooled.starts[:-1].tolist(), pooled.starts[1:].tolist(), strict=True):
        if start < end:
            torch.sum(hidden[start:end], dim=0, dtype=torch.float32, out=part)
    return sums
