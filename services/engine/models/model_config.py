"""The numbers that describe a model of any architecture, as config.json has them."""

import math
from dataclasses import dataclass

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


def read_dtype(raw: ConfigSettings) -> str | None:
    """Returns the checkpoint's dtype by config.json, under either name. Raises ModelError."""
    older = raw.text("torch_dtype")
    name = raw.text("dtype", older)
    if older is not None and name != older:
        raise ModelError(f"config.json: dtype is {name!r}, but torch_dtype is {older!r}")
    if name is not None and name not in DTYPES:
        raise ModelError(f"config.json: dtype {name!r} is not supported (supported: {', '.join(DTYPES)})")
    return name
