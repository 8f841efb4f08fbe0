"""The seam between models and the rest of the engine: a forward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from services.engine.kernels.ranks import RankLink

Head = Callable[[Tensor], Tensor]  # pooled hidden states, float32[P, hidden], to scores, float32[P, labels]


class Weights(Protocol):
    """All of a model's weights, in one dtype."""

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype in which the model computes."""

    @property
    def sinks(self) -> Tensor | None:
        """Returns the sinks of attention, see `Scoring.sinks`; None: there are none."""

    @property
    def ranks(self) -> RankLink | None:
        """Returns where the other ranks of the model belong; None: these weights are the whole model's."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelInput:
    """A step's tokens on the model's device: T tokens of R rows, which lie one after the other."""

    token_ids: Tensor  # int64[T]
    positions: Tensor  # int[T]
    row_starts: Tensor  # int[R + 1]: row r has the tokens from row_starts[r] to row_starts[r + 1]
    plan: Any  # the attention backend's, of this step
    queries: Tensor | None  # int64[Q], tokens whose successors are wanted, in any order; None: all tokens
    token_types: Tensor | None = None  # int[T], for models whose tokens have types; None: all have type 0
    # [T, hidden], of a stage: what the layers before its own have made of the tokens, or room for that in the first
    # stage. What its own layers make of them takes the place. None: the model is whole.
    hidden: Tensor | None = None


class Model(Protocol):
    """A model over one attention backend, and so over one pool of KV blocks."""

    @property
    def head(self) -> Head | None:
        """Returns the head for scores of a model that makes them; None: what is pooled becomes embeddings."""

    def forward(self, step: ModelInput) -> Tensor:
        """Runs all tokens and stores their KV. Returns the hidden states of the queries for `logits`, [Q, width]; what
        a stage that is not the last one returns is of no use.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of the successors, [N, vocab]."""

    def all_logits(self, step: ModelInput) -> Tensor:
        """Returns the logits of all tokens' successors, [T, vocab], whatever the queries; at once if that is faster.

        They are valid until the next step.
        """
