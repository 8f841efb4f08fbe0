"""The decoder: one set of functions for every family, over packed tokens.

What a family has or lacks is in its weights and its `DecoderConfig`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.attention.base import Attention
from services.engine.models.config import DecoderConfig
from services.engine.models.rope import apply_rotation, inverse_frequencies, magnitude, rotation
from services.engine.models.weights import DecoderWeights, LayerWeights


class Decoder:
    """See `Model`."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, attention: Attention[Any]) -> None:
        assert config.rope is not None
        self._config = config
        self._weights = weights
        self._attention = attention
        self._inverse_frequencies = inverse_frequencies(config.rope, config.head_dim)
        self._magnitude = magnitude(config.rope)

    def forward(self, token_ids: Tensor, positions: Tensor, plan: Any, queries: Tensor) -> Tensor:
        """See `Model.forward`."""
        weights, eps = self._weights, self._config.rms_norm_eps
        turn = rotation(self._inverse_frequencies, positions, weights.dtype, self._magnitude)
        x = weights.embedding[token_ids]
        for index, layer in enumerate(weights.layers):
            x = x + self._attend(index, layer, rms_norm(x, layer.input_norm, eps), turn, plan)
            x = x + feed_forward(layer, rms_norm(x, layer.mlp_norm, eps))
        return rms_norm(x[queries], weights.final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        return self._weights.lm_head(hidden)

    def _attend(self, index: int, layer: LayerWeights, x: Tensor, turn: tuple[Tensor, Tensor], plan: Any) -> Tensor:
        config = self._config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = layer.qkv(x).view(len(x), -1, config.head_dim)
        qk, v = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.qk_norm is not None:
            qk = rms_norm(qk, layer.qk_norm, config.rms_norm_eps)
        qk = apply_rotation(qk, *turn)
        self._attention.write(plan, index, qk[:, config.num_heads :], v)
        out, _ = self._attention.attend(plan, index, qk[:, : config.num_heads])
        return layer.output(out.reshape(len(x), -1))


def feed_forward(layer: LayerWeights, x: Tensor) -> Tensor:
    """The gated MLP with SiLU (Shazeer 2020, arXiv 2002.05202), [T, hidden] -> [T, hidden]."""
    gate, up = layer.gate_up(x).chunk(2, dim=-1)
    return layer.down(functional.silu(gate).mul_(up))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467), float32 inside."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
