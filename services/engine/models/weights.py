"""The decoder's weights, read from the tensors of a checkpoint, as parts of layers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.models.config import DecoderConfig, layer_prefix
from services.engine.models.linear import Linear
from services.engine.models.parts import AttentionPart, Mlp, load_attention, load_gated_mlp
from services.engine.models.tensors import Tensors


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a family's layers, each by the function that reads it, which takes the layer's index last."""

    attention: Callable[[Tensors, DecoderConfig, int], AttentionPart] = load_attention
    mlp: Callable[[Tensors, DecoderConfig, int], Mlp] = load_gated_mlp


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor  # [hidden]
    attention: AttentionPart
    mlp_norm: Tensor  # [hidden]
    mlp: Mlp


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All of a decoder's weights, in one dtype."""

    dtype: torch.dtype
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Linear  # hidden -> vocab
    sinks: Tensor | None = None  # float32[layers, heads], see `Scoring`

    @property
    def is_kernels(self) -> bool:
        """Returns True if kernels compute all layers' products."""
        return all(part.is_kernels for layer in self.layers for part in (layer.attention, layer.mlp))


def load_decoder(tensors: Tensors, config: DecoderConfig, parts: LayerParts) -> DecoderWeights:
    """Reads a checkpoint that has these shapes. Raises ModelError."""
    embedding = tensors.vector("model.embed_tokens.weight")
    return DecoderWeights(
        dtype=tensors.dtype,
        embedding=embedding,
        layers=tuple(_load_layer(tensors, config, parts, layer) for layer in range(config.num_layers)),
        final_norm=tensors.vector("model.norm.weight"),
        lm_head=tensors.head(embedding, tied=config.tie_word_embeddings),
    )


def _load_layer(tensors: Tensors, config: DecoderConfig, parts: LayerParts, layer: int) -> LayerWeights:
    prefix = layer_prefix(layer)
    return LayerWeights(
        input_norm=tensors.vector(f"{prefix}input_layernorm.weight"),
        attention=parts.attention(tensors, config, layer),
        mlp_norm=tensors.vector(f"{prefix}post_attention_layernorm.weight"),
        mlp=parts.mlp(tensors, config, layer),
    )
