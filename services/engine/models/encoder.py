"""Encoders: BERT and its kind, with norms after attention and MLP, and ModernBERT, with norms before them.

    BERT        x = norm(words + positions + types);  for each layer:  x = norm(x + attention(x));  x = norm(x + mlp(x))
    ModernBERT  x = norm(words);  for each layer:  x = x + attention(norm(x));  x = x + mlp(norm(x));  then norm(x)

The first layer of ModernBERT has no norm before its attention. `encoder_config.py` names the papers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.attention.base import Attention
from services.engine.kernels.base import Operations
from services.engine.models.base import Head, ModelInput
from services.engine.models.embedding import Embedding
from services.engine.models.encoder_config import EncoderConfig
from services.engine.models.linear import Linear
from services.engine.models.rope import inverse_frequencies, rotation
from services.engine.models.tensors import Tensors

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """LayerNorm (Ba et al. 2016, arXiv 1607.06450), in some models without a bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class EncoderLayer:
    """One layer. Its MLP is gated (GeGLU, Shazeer 2020, arXiv 2002.05202) where `up` makes twice what `down` takes."""

    attention_norm: LayerNorm | None
    qkv: Linear  # hidden -> 3 * hidden, rows in the order Q, K, V
    output: Linear  # hidden -> hidden
    mlp_norm: LayerNorm
    up: Linear  # hidden -> width, or 2 * width
    down: Linear  # width -> hidden


@dataclass(frozen=True, slots=True, eq=False)
class EncoderHead:
    """The head of a cross encoder: one number for each label of what the tokens of a pair were pooled to."""

    dense: Linear  # hidden -> hidden
    activate: Callable[[Tensor], Tensor]
    norm: LayerNorm | None
    output: Linear  # hidden -> labels

    def __call__(self, pooled: Tensor) -> Tensor:
        """Maps [N, hidden] to [N, labels]."""
        x = self.activate(self.dense(pooled))
        return self.output(x if self.norm is None else self.norm(x))


@dataclass(frozen=True, slots=True, eq=False)
class EncoderWeights:
    """All of the weights, in one dtype."""

    dtype: torch.dtype
    embedding: Embedding  # [vocab, hidden]
    positions: Tensor | None  # [num_positions, hidden]; None: they are rotary
    token_types: Tensor | None  # [num_token_types, hidden]
    embedding_norm: LayerNorm
    layers: tuple[EncoderLayer, ...]
    final_norm: LayerNorm | None
    sinks: None = None
    ranks: None = None
    head: EncoderHead | None = None


class Encoder:
    """`Model` of encoders, which has hidden states and no logits."""

    def __init__(
        self, config: EncoderConfig, weights: EncoderWeights, attention: Attention[Any], operations: Operations
    ) -> None:
        self._config = config
        self._weights = weights
        self._attention = attention
        self._operations = operations
        self._activate = _ACTIVATIONS[config.activation]
        ropes = (config.rope, config.local_rope) if config.is_modern else ()
        self._frequencies = [inverse_frequencies(rope, config.head_dim) for rope in ropes if rope is not None]

    def forward(self, step: ModelInput) -> Tensor:
        """See `Model.forward`."""
        x = self._run_modern(step) if self._config.is_modern else self._run_bert(step)
        return x if step.queries is None else x[step.queries]

    @property
    def head(self) -> Head | None:
        """See `Model.head`."""
        return None if self._weights.head is None else self._score

    def _score(self, pooled: Tensor) -> Tensor:
        assert self._weights.head is not None
        return self._weights.head(pooled.to(self._weights.dtype)).to(torch.float32)

    def logits(self, hidden: Tensor) -> Tensor:
        """Raises AssertionError: no scheduler plans a token of an encoder."""
        raise AssertionError("an encoder has no logits")

    def all_logits(self, step: ModelInput) -> Tensor:
        """Raises AssertionError: no scheduler plans a token of an encoder."""
        raise AssertionError("an encoder has no logits")

    def _run_bert(self, step: ModelInput) -> Tensor:
        weights, config = self._weights, self._config
        assert weights.positions is not None
        assert weights.token_types is not None
        places = step.positions.to(torch.int64) + config.first_position
        if config.padding_id is not None:
            places = _places(step, config.padding_id)
        types = weights.token_types[0 if step.token_types is None else step.token_types]
        x = weights.embedding(step.token_ids) + types + weights.positions[places]
        x = weights.embedding_norm(x)
        for index, layer in enumerate(weights.layers):
            assert layer.attention_norm is not None
            x = layer.attention_norm(x + self._attend(layer, index, x, step.plan, None))
            x = layer.mlp_norm(x + layer.down(self._activate(layer.up(x))))
        return x

    def _run_modern(self, step: ModelInput) -> Tensor:
        weights, config = self._weights, self._config
        assert weights.final_norm is not None
        turns = [rotation(frequencies, step.positions, weights.dtype) for frequencies in self._frequencies]
        x = weights.embedding_norm(weights.embedding(step.token_ids))
        for index, layer in enumerate(weights.layers):
            normed = x if layer.attention_norm is None else layer.attention_norm(x)
            turn = turns[config.reaches[index] is not None]
            x = x + self._attend(layer, index, normed, step.plan, turn)
            inner, gate = layer.up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x = x + layer.down(self._activate(inner) * gate)
        return weights.final_norm(x)

    def _attend(
        self, layer: EncoderLayer, index: int, x: Tensor, plan: Any, turn: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Maps [T, hidden] to [T, hidden]. turn: cosine and signed sine of positions; None: heads are not rotated."""
        heads = layer.qkv(x).unflatten(1, (3 * self._config.num_heads, -1))
        if turn is not None:
            self._operations.rotate(heads[:, : 2 * self._config.num_heads], *turn, None, 0.0)
        q, k, v = heads.chunk(3, dim=1)
        attended, _ = self._attention.attend(plan, index, q, k, v)
        return layer.output(attended.flatten(1))


def _places(step: ModelInput, padding_id: int) -> Tensor:
    """Returns the rows of the positions' embedding, int64[T]: tokens are counted in each row from the one after the
    padding's, and padding tokens among them do not count, as in fairseq.
    """
    counts = (step.token_ids != padding_id).to(torch.int64)
    before = functional.pad(counts.cumsum(0), (1, 0))[step.row_starts[:-1].to(torch.int64)]
    lengths = step.row_starts.diff().to(torch.int64)
    return (counts.cumsum(0) - before.repeat_interleave(lengths)) * counts + padding_id


def load_bert(tensors: Tensors, config: EncoderConfig) -> EncoderWeights:
    """Reads a checkpoint of BERT's kind that has these shapes. Raises ModelError."""
    embeddings = f"{config.prefix}embeddings."
    return EncoderWeights(
        dtype=tensors.dtype,
        embedding=tensors.embedding(f"{embeddings}word_embeddings.weight"),
        positions=tensors.vector(f"{embeddings}position_embeddings.weight"),
        token_types=tensors.vector(f"{embeddings}token_type_embeddings.weight"),
        embedding_norm=_load_norm(tensors, config, f"{embeddings}LayerNorm"),
        layers=tuple(
            _load_bert_layer(tensors, config, f"{config.prefix}encoder.layer.{layer}.")
            for layer in range(config.num_layers)
        ),
        final_norm=None,
        head=_load_head(tensors, config),
    )


def load_modernbert(tensors: Tensors, config: EncoderConfig) -> EncoderWeights:
    """Reads a checkpoint of ModernBERT that has these shapes. Raises ModelError."""
    return EncoderWeights(
        dtype=tensors.dtype,
        embedding=tensors.embedding("model.embeddings.tok_embeddings.weight"),
        positions=None,
        token_types=None,
        embedding_norm=_load_norm(tensors, config, "model.embeddings.norm"),
        layers=tuple(_load_modern_layer(tensors, config, layer) for layer in range(config.num_layers)),
        final_norm=_load_norm(tensors, config, "model.final_norm"),
        head=_load_head(tensors, config, norm="head.norm"),
    )


def _load_bert_layer(tensors: Tensors, config: EncoderConfig, prefix: str) -> EncoderLayer:
    attention = f"{prefix}attention."
    return EncoderLayer(
        attention_norm=_load_norm(tensors, config, f"{attention}output.LayerNorm"),
        qkv=tensors.linear(*(f"{attention}self.{name}" for name in ("query", "key", "value")), bias=True),
        output=tensors.linear(f"{attention}output.dense", bias=True),
        mlp_norm=_load_norm(tensors, config, f"{prefix}output.LayerNorm"),
        up=tensors.linear(f"{prefix}intermediate.dense", bias=True),
        down=tensors.linear(f"{prefix}output.dense", bias=True),
    )


def _load_modern_layer(tensors: Tensors, config: EncoderConfig, layer: int) -> EncoderLayer:
    prefix = f"model.layers.{layer}."
    return EncoderLayer(
        attention_norm=_load_norm(tensors, config, f"{prefix}attn_norm") if layer else None,
        qkv=tensors.linear(f"{prefix}attn.Wqkv", bias=config.attention_bias),
        output=tensors.linear(f"{prefix}attn.Wo", bias=config.attention_bias),
        mlp_norm=_load_norm(tensors, config, f"{prefix}mlp_norm"),
        up=tensors.linear(f"{prefix}mlp.Wi", bias=config.mlp_bias),
        down=tensors.linear(f"{prefix}mlp.Wo", bias=config.mlp_bias),
    )


def _load_head(tensors: Tensors, config: EncoderConfig, norm: str | None = None) -> EncoderHead | None:
    """Reads the head of a cross encoder, with a norm where it is named; None: the model has none."""
    if not config.num_labels:
        return None
    dense, output = config.head_names
    return EncoderHead(
        dense=tensors.linear(dense, bias=config.head_bias),
        activate=_ACTIVATIONS[config.head_activation],
        norm=None if norm is None else _load_norm(tensors, config, norm),
        output=tensors.linear(output, bias=True),
    )


def _load_norm(tensors: Tensors, config: EncoderConfig, name: str) -> LayerNorm:
    bias = tensors.vector(f"{name}.bias") if config.norm_bias else None
    return LayerNorm(tensors.vector(f"{name}.weight"), bias, config.norm_eps)
