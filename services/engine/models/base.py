"""The seam between models and the rest of the engine: a few numbers that describe a model, and a forward pass."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from services.engine.models.rope_settings import Rope
from services.engine.models.settings import ConfigSettings
from services.protocol.model_files.base import ModelError

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The part of a model's shape that every architecture has. Subclasses add fields of their own."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: Rope | None  # None: positions are learned
    window: int | None  # positions that a token sees, its own included; None: all before it
    tie_word_embeddings: bool
    dtype: str | None  # of the checkpoint; None: config.json names none

    @property
    def output_size(self) -> int:
        """Returns the width of what `Model.forward` returns."""
        return self.hidden_size

    @property
    def scale(self) -> float:
        """Returns the factor on attention scores."""
        return 1 / math.sqrt(self.head_dim)


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


def read_dtype(raw: ConfigSettings) -> str | None:
    """Returns the checkpoint's dtype by config.json, under either name. Raises ModelError."""
    older = raw.text("torch_dtype")
    name = raw.text("dtype", older)
    if older is not None and name != older:
        raise ModelError(f"config.json: dtype is {name!r}, but torch_dtype is {older!r}")
    if name is not None and name not in DTYPES:
        raise ModelError(f"config.json: dtype {name!r} is not supported (supported: {', '.join(DTYPES)})")
    return name
