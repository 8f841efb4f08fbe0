"""The decoder's weights, read from the tensors of a checkpoint.

The rows of Q, K and V are one matrix, and so are those of gate and up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.models.config import DecoderConfig
from services.engine.models.linear import Linear
from services.engine.models.tensors import Tensors


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of one decoder layer."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * head_dim, rows in the order Q, K, V
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: the weight for each head of Q, then of K
    output: Linear  # heads * head_dim -> hidden
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 * intermediate, gate first
    down: Linear  # intermediate -> hidden


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All of a decoder's weights, in one dtype."""

    dtype: torch.dtype
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Linear  # hidden -> vocab

    @property
    def is_kernels(self) -> bool:
        """Returns True if kernels compute all layers' products."""
        return all(
            linear.is_kernel for layer in self.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )


def load_decoder(tensors: Tensors, config: DecoderConfig) -> DecoderWeights:
    """Reads a checkpoint that has these shapes. Raises ModelError."""
    embedding = tensors.vector("model.embed_tokens.weight")
    return DecoderWeights(
        dtype=tensors.dtype,
        embedding=embedding,
        layers=tuple(_load_layer(tensors, config, f"model.layers.{layer}.") for layer in range(config.num_layers)),
        final_norm=tensors.vector("model.norm.weight"),
        lm_head=tensors.head(embedding, tied=config.tie_word_embeddings),
    )


def _load_layer(tensors: Tensors, config: DecoderConfig, prefix: str) -> LayerWeights:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    return LayerWeights(
        input_norm=tensors.vector(f"{prefix}input_layernorm.weight"),
        qkv=tensors.linear(*(f"{attention}{name}_proj" for name in "qkv"), bias=config.qkv_bias),
        qk_norm=_load_qk_norm(tensors, config, attention) if config.qk_norm else None,
        output=tensors.linear(f"{attention}o_proj", bias=config.output_bias),
        mlp_norm=tensors.vector(f"{prefix}post_attention_layernorm.weight"),
        gate_up=tensors.linear(f"{mlp}gate_proj", f"{mlp}up_proj", bias=config.mlp_bias),
        down=tensors.linear(f"{mlp}down_proj", bias=config.mlp_bias),
    )


def _load_qk_norm(tensors: Tensors, config: DecoderConfig, attention: str) -> Tensor:
    q_norm = tensors.vector(f"{attention}q_norm.weight").expand(config.num_heads, -1)
    k_norm = tensors.vector(f"{attention}k_norm.weight").expand(config.num_kv_heads, -1)
    return torch.cat((q_norm, k_norm))
