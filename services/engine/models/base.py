"""What every model is to the rest of the engine: a few numbers that describe it, and a forward pass."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from services.engine.models.rope_settings import Rope
from services.protocol.model_files.base import ModelError, Settings

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's shape as far as every architecture has it. Subclasses add what theirs depends on."""

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
    dtype: str | None  # of the checkpoint, where config.json says it

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return 1 / math.sqrt(self.head_dim)


class Weights(Protocol):
    """All of a model's weights, in one dtype."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""


class Model(Protocol):
    """A model over one attention backend, and so over one pool of KV blocks."""

    def forward(self, token_ids: Tensor, positions: Tensor, plan: Any, queries: Tensor) -> Tensor:
        """Runs T tokens (int64[T] ids, int[T] positions), storing their KV.

        The tokens of all rows lie one after the other; attention alone knows which row a token belongs to. plan: what
        the attention backend prepared for this step. queries: int64[N], the tokens whose successor is asked for.
        Returns what `logits` makes their logits of, [N, width].
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, vocab] of the successors."""

    def all_logits(self, token_ids: Tensor, positions: Tensor, plan: Any) -> Tensor:
        """[T, vocab] of the successors of all tokens, at once where that is faster. They hold until the next step."""


def read_dtype(raw: Settings) -> str | None:
    """The checkpoint's dtype by config.json, under either name. Raises ModelError."""
    name = raw.get("dtype", raw.get("torch_dtype"))
    if name is not None and name not in DTYPES:
        raise ModelError(f"config.json: dtype {name!r} is not supported (supported: {', '.join(DTYPES)})")
    return name
