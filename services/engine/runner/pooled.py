"""Sums of hidden states, for embeddings and scores of prompts: on every device in the same order, and so the same."""

import numpy as np
import torch
from torch import Tensor

from services.engine.models.base import Head
from services.engine.runner.base import PooledTokens


def pooled_outputs(hidden: Tensor, pooled: PooledTokens, head: Head | None) -> Tensor:
    """Returns what is added up for each of P prompts over its chunks, float32[P, size], on the device of the hidden
    states, [Q, hidden].

    With a head it is what the head makes of the mean of a prompt's tokens here, as often as there are tokens. Where the
    head is not linear, prompts of which several tokens are pooled are whole in a step.
    """
    sums = _sums(hidden, pooled)
    if head is None:
        return sums
    counts = torch.from_numpy(np.diff(pooled.starts)).to(sums.device)[:, None]
    return head(sums / counts.clamp(min=1)) * counts


def _sums(hidden: Tensor, pooled: PooledTokens) -> Tensor:
    sums = torch.zeros(len(pooled.starts) - 1, hidden.shape[1], device=hidden.device)
    for part, start, end in zip(sums, pooled.starts[:-1].tolist(), pooled.starts[1:].tolist(), strict=True):
        if start < end:
            torch.sum(hidden[start:end], dim=0, dtype=torch.float32, out=part)
    return sums
