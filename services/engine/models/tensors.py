"""A checkpoint's tensors as a model wants them: checked, cast, fused, and packed for the matrix library.

All tensors are checked before the first is read, so a checkpoint that does not fit fails at once.
"""

import torch
from torch import Tensor

from services.engine.models.base import ModelConfig
from services.engine.models.checkpoint import Checkpoint
from services.engine.models.linear import Linear
from services.protocol.model_dir import ModelError

Shapes = dict[str, tuple[int, ...]]  # by the tensor's name


class Tensors:
    """Reads tensors of one checkpoint in one dtype. fused: linear layers may use fused kernels."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, *, fused: bool) -> None:
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._fused = fused

    def linear(self, *names: str, bias: bool) -> Linear:
        """A linear layer with the rows of these, one below the other; `{name}.weight`, and `{name}.bias` if it has one.

        Fewer and larger products are faster.
        """
        weight = torch.cat([self._read(f"{name}.weight") for name in names])
        biases = torch.cat([self._read(f"{name}.bias") for name in names]) if bias else None
        return Linear(weight, biases, fused=self._fused)

    def head(self, embedding: Tensor, *, tied: bool) -> Linear:
        """The output layer: the embedding itself where they are tied."""
        return Linear(embedding if tied else self._read("lm_head.weight"), None, fused=self._fused)

    def vector(self, name: str) -> Tensor:
        """A tensor that is kept as it is: a copy, since the file may change once it is closed."""
        return self._read(name).clone()

    def _read(self, name: str) -> Tensor:
        return self._checkpoint.read(name, self.dtype)


def check_tensors(checkpoint: Checkpoint, config: ModelConfig, expected: Shapes) -> None:
    """Raises ModelError for anything missing, misshapen or unexpected."""
    for name, shape in expected.items():
        checkpoint.check(name, shape)
    for name in sorted(checkpoint.names - expected.keys()):
        if not _is_redundant(name, config):
            raise ModelError(
                f"{checkpoint.home(name)}: tensor {name} is not part of {config.architecture} as config.json has it"
            )


def linear_shapes(name: str, out: int, hidden: int, bias: bool) -> Shapes:
    """The tensors of one linear layer."""
    weight: Shapes = {f"{name}.weight": (out, hidden)}
    return weight | {f"{name}.bias": (out,)} if bias else weight


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """True for tensors that repeat what is known: stored rotary frequencies, and the head of a tied model."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)
