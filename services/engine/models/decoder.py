"""The decoder: one set of functions for every family, over packed tokens.

Differences between families are in their weights and their `DecoderConfig`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from services.engine.attention.base import Attention
from services.engine.kernels.base import Operations, Rows
from services.engine.models.config import DecoderConfig
from services.engine.models.rope import inverse_frequencies, magnitude, rotation
from services.engine.models.weights import DecoderWeights

_MAX_RECORDED_TOKENS = 160  # longer steps are long beside the way from Python into each kernel, or run by rows


class Decoder:
    """`Model` of every family of decoders."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, attention: Attention[Any], operations: Operations
    ) -> None:
        assert config.rope is not None
        self._config = config
        self._weights = weights
        self._attention = attention
        self._operations = operations
        self._inverse_frequencies = inverse_frequencies(config.rope, config.head_dim).to(weights.embedding.device)
        self._magnitude = magnitude(config.rope)
        self._rotate_and_write = attention.rotate_and_write or self._rotate_then_write
        self._is_kernels = weights.is_kernels and attention.writes_by_kernel
        self._own = object()  # identifies this model's recordings
        widest = max(
            (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
            config.num_heads * config.head_dim,
            config.intermediate_size,
        )
        self._row_bytes = (config.hidden_size + widest) * weights.dtype.itemsize
        self._norms_after = (*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm)

    def forward(self, token_ids: Tensor, positions: Tensor, plan: Any, queries: Tensor) -> Tensor:
        """See `Model.forward`."""
        if 2 * len(queries) > len(token_ids):  # copies of so many rows would take more memory than any other layer
            return self._run(token_ids, positions, plan, None, with_logits=False)[queries]
        return self._run(token_ids, positions, plan, queries, with_logits=False)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        return self._weights.lm_head(hidden)

    def all_logits(self, token_ids: Tensor, positions: Tensor, plan: Any) -> Tensor:
        """See `Model.all_logits`."""
        if self._weights.lm_head.is_kernel:
            return self._run(token_ids, positions, plan, None, with_logits=True)
        return self.logits(self._run(token_ids, positions, plan, None, with_logits=False))

    def _run(
        self, token_ids: Tensor, positions: Tensor, plan: Any, queries: Tensor | None, *, with_logits: bool
    ) -> Tensor:
        """Returns the output of the last norm for the queries, or their logits. queries: None for all tokens."""
        weights = self._weights
        turn = rotation(self._inverse_frequencies, positions, weights.dtype, self._magnitude)
        x = weights.embedding[token_ids]

        def body(some: Tensor | None) -> Tensor:
            hidden = self._run_layers(x, turn, plan, some)
            return self.logits(hidden) if with_logits else hidden

        inputs = self._attention.kernel_inputs(plan)
        if inputs is None or not self._is_kernels or len(x) > _MAX_RECORDED_TOKENS:
            return body(queries)
        numbers, tensors = inputs
        key = (self._own, with_logits, len(x), *numbers)
        of_all = self._operations.replay(key, (x, *turn, *tensors), partial(body, None))
        return of_all if queries is None else of_all[queries]

    def _run_layers(self, x: Tensor, turn: tuple[Tensor, Tensor], plan: Any, queries: Tensor | None) -> Tensor:
        """Runs all layers and the last norm on x, [T, hidden], which is overwritten.

        The last layer's K, V and attention are computed for all tokens; what follows its attention, for the queries
        alone.
        """
        last = len(self._weights.layers) - 1
        qkv = self._by_rows(x, partial(self._first, x, turn, plan))
        for index in range(last):
            attended, _ = self._attention.attend(plan, index, *qkv)
            qkv = self._by_rows(x, partial(self._between, index, x, attended, turn, plan))
        if queries is not None and not len(queries):
            return x[queries]  # no rows: the last layer's K and V are written, and nobody wants more
        attended, _ = self._attention.attend(plan, last, *qkv)
        if queries is not None:
            x, attended = x[queries], attended[queries]
        return self._by_rows(x, partial(self._end, last, x, attended))

    def _by_rows(self, x: Tensor, body: Callable[[], Rows]) -> Rows:
        """Runs the part between two layers' attentions, by rows if it consists of kernels alone."""
        if not self._is_kernels:
            return body()
        return self._operations.by_rows(len(x), self._row_bytes, body)

    def _first(self, x: Tensor, turn: tuple[Tensor, Tensor], plan: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Runs the first layer up to its attention."""
        normed = self._operations.norm(x, self._weights.layers[0].input_norm, self._config.rms_norm_eps)
        return self._begin(0, normed, turn, plan)

    def _between(
        self, index: int, x: Tensor, attended: Tensor, turn: tuple[Tensor, Tensor], plan: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs from a layer's attention to that of the next layer."""
        return self._begin(index + 1, self._end(index, x, attended), turn, plan)

    def _begin(
        self, index: int, normed: Tensor, turn: tuple[Tensor, Tensor], plan: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs a layer up to its attention. Returns q, k and v, [T, heads or kv_heads, head_dim]."""
        layer = self._weights.layers[index]
        heads = layer.qkv(normed).unflatten(1, (-1, self._config.head_dim))
        return self._rotate_and_write(plan, index, heads, *turn, layer.qk_norm, self._config.rms_norm_eps)

    def _rotate_then_write(
        self, plan: Any, index: int, heads: Tensor, cos: Tensor, signed_sin: Tensor, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Does the work of `Attention.rotate_and_write` by two operations."""
        config = self._config
        self._operations.rotate(heads[:, : config.num_heads + config.num_kv_heads], cos, signed_sin, weight, eps)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        self._attention.write(plan, index, k, v)
        return q, k, v

    def _end(self, index: int, x: Tensor, attended: Tensor) -> Tensor:
        """Runs a layer from its attention on: adds to x, and returns the output of the norm after the layer."""
        layer, operations, eps = self._weights.layers[index], self._operations, self._config.rms_norm_eps
        between = operations.add_norm(x, layer.output(attended.flatten(1)), layer.mlp_norm, eps)
        fed = layer.down(layer.gate_up.gated(between, operations.silu_mul))
        return operations.add_norm(x, fed, self._norms_after[index], eps)
