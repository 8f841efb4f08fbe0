"""OPT (Zhang et al. 2022, arXiv 2205.01068): learned positions, LayerNorm, a plain MLP with ReLU.

The published sizes differ in two things. All but 350m have norms before attention and MLP, and one more at the end;
350m has norms after each and none at the end, and its embedding is narrower than the model, with a projection on either
side.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.attention.base import Attention
from services.engine.kernels.base import Operations
from services.engine.kernels.ranks import RankLink
from services.engine.models.base import ModelInput
from services.engine.models.embedding import Embedding
from services.engine.models.linear import Linear
from services.engine.models.opt_config import POSITION_OFFSET, OptConfig
from services.engine.models.parts import ReluMlp
from services.engine.models.tensors import Tensors

_EPS = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """LayerNorm (Ba et al. 2016, arXiv 1607.06450)."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, _EPS)


@dataclass(frozen=True, slots=True, eq=False)
class OptAttention:
    """Attention with a head of K and V for each of Q, without rotation (Vaswani et al. 2017, arXiv 1706.03762)."""

    qkv: Linear  # hidden -> 3 * hidden, rows in the order Q, K, V
    output: Linear  # hidden -> hidden
    num_heads: int

    def forward(self, x: Tensor, attention: Attention[Any], plan: Any, index: int) -> Tensor:
        """Maps [T, hidden] to [T, hidden]. index: of the layer, whose K and V are written to the pool."""
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, -1).unbind(1)
        attention.write(plan, index, k, v)
        attended, _ = attention.attend(plan, index, q, k, v)
        return self.output(attended.reshape(len(x), -1))


@dataclass(frozen=True, slots=True, eq=False)
class OptLayer:
    """One layer."""

    attention_norm: Norm
    attention: OptAttention
    mlp_norm: Norm
    mlp: ReluMlp


@dataclass(frozen=True, slots=True, eq=False)
class OptWeights:
    """All of the weights, in one dtype."""

    dtype: torch.dtype
    embedding: Embedding | None  # [vocab, embedding]; None: another stage has it, as others below
    positions: Tensor | None  # [max_position_embeddings + 2, hidden]
    project_in: Linear | None  # embedding -> hidden
    layers: tuple[OptLayer, ...]
    final_norm: Norm | None
    project_out: Linear | None  # hidden -> embedding
    lm_head: Linear | None  # embedding -> vocab
    sinks: None = None
    ranks: RankLink | None = None


def load_opt(tensors: Tensors, config: OptConfig) -> OptWeights:
    """Reads a checkpoint that has these shapes. Raises ModelError."""
    prefix = "model.decoder."
    embedding, positions = f"{prefix}embed_tokens.weight", f"{prefix}embed_positions.weight"
    own_embedding = tensors.embedding(embedding) if tensors.has(embedding) else None
    has_first, has_last = config.stage.is_first, config.stage.is_last
    return OptWeights(
        dtype=tensors.dtype,
        embedding=own_embedding,
        positions=tensors.vector(positions) if has_first else None,
        project_in=tensors.linear(f"{prefix}project_in", bias=False) if config.projects and has_first else None,
        layers=tuple(_load_layer(tensors, config, f"{prefix}layers.{layer}.") for layer in range(config.num_layers)),
        final_norm=_load_norm(tensors, f"{prefix}final_layer_norm") if config.final_norm and has_last else None,
        project_out=tensors.linear(f"{prefix}project_out", bias=False) if config.projects and has_last else None,
        lm_head=tensors.head(own_embedding if config.tie_word_embeddings else None, config.vocab_size)
        if has_last
        else None,
        ranks=tensors.ranks,
    )


class Opt:
    """`Model` of OPT."""

    def __init__(
        self, config: OptConfig, weights: OptWeights, attention: Attention[Any], operations: Operations
    ) -> None:
        self._config = config
        self._weights = weights
        self._attention = attention
        self._operations = operations

    def forward(self, step: ModelInput) -> Tensor:
        """See `Model.forward`."""
        x = self._run_layers(step)
        return self._end(x if step.queries is None else x[step.queries])

    @property
    def head(self) -> None:
        """See `Model.head`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        assert self._weights.lm_head is not None, "another stage has the output layer"
        return self._weights.lm_head(hidden)

    def all_logits(self, step: ModelInput) -> Tensor:
        """See `Model.all_logits`."""
        return self.logits(self._end(self._run_layers(step)))

    def _run_layers(self, step: ModelInput) -> Tensor:
        """Runs all layers. Returns [T, hidden]."""
        weights, norm_first = self._weights, self._config.norm_first
        x = self._begun(step)
        for index, layer in enumerate(weights.layers):
            attend = partial(layer.attention.forward, attention=self._attention, plan=step.plan, index=index)
            feed = partial(layer.mlp.forward, operations=self._operations)
            if norm_first:
                x = x + attend(layer.attention_norm(x))
                x = x + feed(layer.mlp_norm(x))
            else:
                x = layer.attention_norm(x + attend(x))
                x = layer.mlp_norm(x + feed(x))
        return x if step.hidden is None else step.hidden.copy_(x)

    def _begun(self, step: ModelInput) -> Tensor:
        """Returns what the layers get, [T, hidden]."""
        weights = self._weights
        if not self._config.stage.is_first:
            assert step.hidden is not None
            return step.hidden
        assert weights.embedding is not None
        assert weights.positions is not None
        x = weights.embedding(step.token_ids)
        if weights.project_in is not None:
            x = weights.project_in(x)
        return x + weights.positions[step.positions + POSITION_OFFSET]

    def _end(self, x: Tensor) -> Tensor:
        """Runs the part after the layers, [N, hidden] -> [N, embedding]."""
        normed = x if self._weights.final_norm is None else self._weights.final_norm(x)
        return normed if self._weights.project_out is None else self._weights.project_out(normed)


def _load_layer(tensors: Tensors, config: OptConfig, prefix: str) -> OptLayer:
    attention = f"{prefix}self_attn."
    return OptLayer(
        attention_norm=_load_norm(tensors, f"{prefix}self_attn_layer_norm"),
        attention=OptAttention(
            qkv=tensors.linear(*(f"{attention}{name}_proj" for name in "qkv"), bias=config.bias),
            output=tensors.linear(f"{attention}out_proj", bias=config.bias),
            num_heads=config.num_heads,
        ),
        mlp_norm=_load_norm(tensors, f"{prefix}final_layer_norm"),
        mlp=ReluMlp(
            up=tensors.linear(f"{prefix}fc1", bias=config.bias),
            down=tensors.linear(f"{prefix}fc2", bias=config.bias),
            width=config.intermediate_size,
        ),
    )


def _load_norm(tensors: Tensors, name: str) -> Norm:
    return Norm(tensors.vector(f"{name}.weight"), tensors.vector(f"{name}.bias"))
