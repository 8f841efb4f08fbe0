"""The decoder: one set of functions for every family, over packed tokens.

What a family has or lacks is in its weights and its `DecoderConfig`.
"""

from typing import Any

import torch
from torch import Tensor

from services.engine.attention.base import Attention
from services.engine.kernels.base import Operations
from services.engine.models.config import DecoderConfig
from services.engine.models.linear import MAX_FEW_ROWS, in_pieces
from services.engine.models.rope import inverse_frequencies, magnitude, rotation
from services.engine.models.weights import DecoderWeights, LayerWeights


class Decoder:
    """See `Model`."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, attention: Attention[Any], operations: Operations
    ) -> None:
        assert config.rope is not None
        self._config = config
        self._weights = weights
        self._attention = attention
        self._operations = operations
        self._inverse_frequencies = inverse_frequencies(config.rope, config.head_dim)
        self._magnitude = magnitude(config.rope)
        self._is_kernels = weights.is_kernels
        self._own = object()  # whose layers are recorded
        self._norms_after = (*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm)

    def forward(self, token_ids: Tensor, positions: Tensor, plan: Any, queries: Tensor) -> Tensor:
        """See `Model.forward`."""
        weights = self._weights
        turn = rotation(self._inverse_frequencies, positions, weights.dtype, self._magnitude)
        x = weights.embedding[token_ids]
        inputs = self._attention.kernel_inputs(plan)
        if inputs is None or not self._is_kernels or len(x) > MAX_FEW_ROWS:
            out = self._run_layers(x, turn, plan)
        else:
            numbers, tensors = inputs
            key = (self._own, len(x), *numbers)
            out = self._operations.replay(key, (x, *turn, *tensors), lambda: self._run_layers(x, turn, plan))
        return out[queries]

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        return self._weights.lm_head(hidden)

    def _run_layers(self, x: Tensor, turn: tuple[Tensor, Tensor], plan: Any) -> Tensor:
        """[T, hidden], which is overwritten, to what the last norm makes of it."""
        layers, operations, eps = self._weights.layers, self._operations, self._config.rms_norm_eps
        pieces = in_pieces(x)  # a piece goes from one attention to the next while it is in the cache
        normed = [operations.norm(piece, layers[0].input_norm, eps) for piece in pieces]
        for index, (layer, norm_after) in enumerate(zip(layers, self._norms_after, strict=True)):
            attended = in_pieces(self._attend(index, layer, normed, turn, plan))
            for number, (piece, out) in enumerate(zip(pieces, attended, strict=True)):
                between = operations.add_norm(piece, layer.output(out), layer.mlp_norm, eps)
                fed = layer.down(layer.gate_up.gated(between, operations.silu_mul))
                normed[number] = operations.add_norm(piece, fed, norm_after, eps)
        return _joined(normed)

    def _attend(
        self, index: int, layer: LayerWeights, pieces: list[Tensor], turn: tuple[Tensor, Tensor], plan: Any
    ) -> Tensor:
        """[T, heads * head_dim] from the normed input, [T, hidden] in pieces."""
        config = self._config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = _joined([layer.qkv(piece) for piece in pieces]).unflatten(1, (-1, config.head_dim))
        self._operations.rotate(heads[:, :num_rotated], *turn, layer.qk_norm, config.rms_norm_eps)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        self._attention.write(plan, index, k, v)
        out, _ = self._attention.attend(plan, index, q, k, v)
        return out.flatten(1)


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
