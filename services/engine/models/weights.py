"""The decoder's weights, read from the tensors of a checkpoint, as parts of layers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.kernels.ranks import RankLink
from services.engine.models.config import SCORE, DecoderConfig, layer_prefix
from services.engine.models.embedding import Embedding
from services.engine.models.families import FAMILIES
from services.engine.models.linear import Linear
from services.engine.models.parts import AttentionPart, Mlp, load_attention, load_gated_mlp, load_norm
from services.engine.models.tensors import EMBEDDING, HEAD, Tensors


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a family's layers, each by the function that reads it, which takes the layer's index last."""

    attention: Callable[[Tensors, DecoderConfig, int], AttentionPart] = load_attention
    mlp: Callable[[Tensors, DecoderConfig, int], Mlp] = load_gated_mlp


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer. Norms, [hidden], are RMSNorms; None: the family has none at this place."""

    input_norm: Tensor | None
    attention: AttentionPart
    attended_norm: Tensor | None  # of what attention adds to a token
    mlp_norm: Tensor | None
    mlp: Mlp
    fed_norm: Tensor | None  # of what the MLP adds


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All of a decoder's weights, in one dtype."""

    dtype: torch.dtype
    embedding: Embedding | None  # [vocab, hidden]; None: another stage has it
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    # hidden -> vocab; of a model with a head for scores that head, hidden -> labels, in float32; None: another stage's
    lm_head: Linear | None
    sinks: Tensor | None = None  # float32[layers, heads], see `Scoring`
    ranks: RankLink | None = None

    @property
    def is_kernels(self) -> bool:
        """Returns True if kernels compute all layers' products."""
        return all(part.is_kernels for layer in self.layers for part in (layer.attention, layer.mlp))


def load_decoder(tensors: Tensors, config: DecoderConfig, parts: LayerParts) -> DecoderWeights:
    """Reads a checkpoint that has these shapes. Raises ModelError."""
    embedding = tensors.embedding(EMBEDDING) if tensors.has(EMBEDDING) else None
    return DecoderWeights(
        dtype=tensors.dtype,
        embedding=embedding,
        layers=tuple(_load_layer(tensors, config, parts, layer) for layer in range(config.num_layers)),
        final_norm=load_norm(tensors, config, "model.norm"),
        lm_head=_load_output(tensors, config, embedding) if config.stage.is_last else None,
        sinks=_load_sinks(tensors, config) if config.attention_sinks else None,
        ranks=tensors.ranks,
    )


def _load_layer(tensors: Tensors, config: DecoderConfig, parts: LayerParts, layer: int) -> LayerWeights:
    prefix, norms = layer_prefix(layer), FAMILIES[config.architecture].norms

    def norm(name: str | None) -> Tensor | None:
        return None if name is None else load_norm(tensors, config, f"{prefix}{name}")

    return LayerWeights(
        input_norm=norm(norms.before_attention),
        attention=parts.attention(tensors, config, layer),
        attended_norm=norm(norms.after_attention),
        mlp_norm=norm(norms.before_mlp),
        mlp=parts.mlp(tensors, config, layer),
        fed_norm=norm(norms.after_mlp),
    )


def _load_output(tensors: Tensors, config: DecoderConfig, embedding: Embedding | None) -> Linear:
    """Reads the output layer, or the head for scores, which may be the difference of two rows of the output layer."""
    tied = embedding if config.tie_word_embeddings else None
    if config.score_tokens:
        assert embedding is not None, "stages do not share a scorer"
        ids = torch.tensor(config.score_token_ids, device=embedding.device)
        rows = embedding(ids) if tied is not None else tensors.vector(HEAD)[ids]
        no, yes = rows.to(torch.float32)
        return Linear((yes - no)[None], None)
    if config.num_labels:
        return Linear(tensors.vector(SCORE).to(torch.float32), None)
    return tensors.head(tied, config.vocab_size)


def _load_sinks(tensors: Tensors, config: DecoderConfig) -> Tensor:
    names = (f"{layer_prefix(layer)}self_attn.sinks" for layer in range(config.num_layers))
    return torch.stack([tensors.vector(name).to(torch.float32) for name in names])
