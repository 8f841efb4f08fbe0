"""The seam between models and the rest of the engine: a forward pass."""

from typing import Any, Protocol

import torch
from torch import Tensor


class Weights(Protocol):
    """All of a model's weights, in one dtype."""

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype in which the model computes."""


class Model(Protocol):
    """A model over one attention backend, and so over one pool of KV blocks."""

    def forward(self, token_ids: Tensor, positions: Tensor, plan: Any, queries: Tensor) -> Tensor:
        """Runs T tokens (int64[T] ids, int[T] positions), and stores their KV.

        The tokens of all rows lie one after the other; only attention knows which row a token belongs to. plan: the
        attention backend's plan of this step. queries: int64[N], the tokens whose successor is wanted. Returns their
        hidden states for `logits`, [N, width].
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of the successors, [N, vocab]."""

    def all_logits(self, token_ids: Tensor, positions: Tensor, plan: Any) -> Tensor:
        """Returns the logits of all tokens' successors, [T, vocab], at once if that is faster. They are valid until the
        next step.
        """
