"""The decoder: one way through the layers for every family, over packed tokens.

    x = embedding(tokens)
    for each layer:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    hidden = norm(x)

Some families norm what attention and MLP add, beside what they get or instead of it: x = x + norm(attention(x)).

Differences between families are in the parts of their layers and their `DecoderConfig`.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from services.engine.attention.base import Attention
from services.engine.kernels.base import Operations, Rows
from services.engine.models.base import Head, ModelInput
from services.engine.models.config import DecoderConfig
from services.engine.models.linear import Linear
from services.engine.models.parts import GroupedAttention, Turn
from services.engine.models.rope import inverse_frequencies, magnitude, rotation
from services.engine.models.weights import DecoderWeights

Turns = tuple[Turn, ...]  # of each distinct rope

# Longer steps are not recorded: they run by rows, or their kernels take so long that a call from Python for each kernel
# adds little.
_MAX_RECORDED_TOKENS = 160
_MIN_NARROWED_TOKENS = _MAX_RECORDED_TOKENS + 1  # recorded or not, shorter steps compute the same to the bit


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
        ropes = [config.rope_of(layer) or config.rope for layer in range(config.num_layers)]
        distinct = tuple(dict.fromkeys(ropes))
        self._turn_of = tuple(map(distinct.index, ropes))  # of each layer
        self._rotations = [
            (inverse_frequencies(rope, config.rotary_dim).to(weights.final_norm.device), magnitude(rope))
            for rope in distinct
        ]
        self._embedding_scale = None
        if config.embedding_scale is not None:
            dtype = weights.dtype if config.rounds_embedding_scale else torch.float32
            self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self._rotate_and_write = attention.rotate_and_write or self._rotate_then_write
        self._is_kernels = weights.is_kernels and attention.writes_by_kernel
        self._own = object()  # identifies this model's recordings
        widest = max(part.width for layer in weights.layers for part in (layer.attention, layer.mlp))
        self._row_bytes = (config.hidden_size + widest) * weights.dtype.itemsize
        self._norms_after = (*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm)
        # The last layer's Q, and its K and V, as parts of their own; None: they are computed together.
        self._last = weights.layers[-1].attention.halves() if self._is_kernels and len(weights.layers) > 1 else None

    def forward(self, step: ModelInput) -> Tensor:
        """See `Model.forward`."""
        queries = step.queries
        if queries is None or 2 * len(queries) <= len(step.token_ids):
            return self._run(step, queries, with_logits=False)
        # Copies of so many rows would take more memory than any other layer.
        return self._run(step, None, with_logits=False)[queries]

    @property
    def head(self) -> Head | None:
        """See `Model.head`."""
        return self._lm_head if self._config.num_labels else None

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        return self._scaled(self._lm_head(hidden))

    def all_logits(self, step: ModelInput) -> Tensor:
        """See `Model.all_logits`."""
        if self._lm_head.is_kernel:
            return self._scaled(self._run(step, None, with_logits=True))
        return self.logits(self._run(step, None, with_logits=False))

    @property
    def _lm_head(self) -> Linear:
        found = self._weights.lm_head
        assert found is not None, "another stage has the output layer"
        return found

    def _begun(self, step: ModelInput) -> Tensor:
        """Returns what the layers get, [T, hidden], in memory that they may overwrite."""
        if not self._config.stage.is_first:
            assert step.hidden is not None
            return step.hidden
        assert self._weights.embedding is not None
        x = self._weights.embedding(step.token_ids)
        if self._embedding_scale is not None:
            x *= self._embedding_scale
        return x if step.hidden is None else step.hidden.copy_(x)

    def _scaled(self, logits: Tensor) -> Tensor:
        """Divides logits and gives them a soft cap, in place, where the family does."""
        cap, scaling = self._config.final_softcap, self._config.logits_scaling
        if scaling != 1:
            logits.div_(scaling)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _run(self, step: ModelInput, queries: Tensor | None, *, with_logits: bool) -> Tensor:
        """Returns the output of the last norm for the queries, or their logits before they are scaled. queries: None
        for all tokens.
        """
        weights, plan = self._weights, step.plan
        turns = tuple(rotation(inverse, step.positions, weights.dtype, by) for inverse, by in self._rotations)
        x = self._begun(step)

        def body(some: Tensor | None) -> Tensor:
            hidden = self._run_layers(x, turns, plan, some)
            return self._lm_head(hidden) if with_logits else hidden

        inputs = self._attention.kernel_inputs(plan)
        if inputs is None or not self._is_kernels or len(x) > _MAX_RECORDED_TOKENS:
            return body(queries)
        numbers, tensors = inputs
        key = (self._own, with_logits, len(x), *numbers)
        of_all = self._operations.replay(key, (x, *chain(*turns), *tensors), partial(body, None))
        return of_all if queries is None else of_all[queries]

    def _run_layers(self, x: Tensor, turns: Turns, plan: Any, queries: Tensor | None) -> Tensor:
        """Runs all layers and the last norm on x, [T, hidden], which is overwritten.

        The last layer's K and V are computed for all tokens; what follows its attention, and if it saves time Q and
        attention too, for the queries alone.
        """
        last = len(self._weights.layers) - 1
        narrowed = None
        if queries is not None and self._last is not None and len(x) >= _MIN_NARROWED_TOKENS:
            narrowed = self._attention.narrow(plan, queries, last)
        qkv = self._by_rows(x, partial(self._first, x, turns, plan))
        for index in range(last if narrowed is None else last - 1):
            attended = self._attend(plan, index, qkv)
            qkv = self._end(index, x, attended, partial(self._begin, index + 1, turns=turns, plan=plan))
        if narrowed is not None and queries is not None:
            attended = self._attend(plan, last - 1, qkv)
            return self._run_last(x, attended, turns, (plan, narrowed), queries)
        if queries is not None and not len(queries):
            return x[queries]  # no rows: the last layer's K and V are written, and nobody wants more
        attended = self._attend(plan, last, qkv)
        if queries is not None:
            x, attended = x[queries], attended[queries]
        return self._end(last, x, attended, _unchanged)

    def _run_last(self, x: Tensor, attended: Tensor, turns: Turns, plans: tuple[Any, Any], queries: Tensor) -> Tensor:
        """Runs from the last but one attention on. plans: for all tokens, and for the queries."""
        last, (plan, narrowed) = len(self._weights.layers) - 1, plans
        assert self._last is not None
        normed = self._end(last - 1, x, attended, partial(self._write_last_keys, turns=turns, plan=plan))
        x = x[queries]
        if not len(queries):
            return x
        cos, signed_sin = turns[self._turn_of[last]]
        q = self._last[0].forward(normed[queries], (cos[queries], signed_sin[queries]), self._operations)
        attended = self._attend(narrowed, last, (q, q[:0], q[:0]))
        return self._end(last, x, attended, _unchanged)

    def _write_last_keys(self, normed: Tensor, turns: Turns, plan: Any) -> Tensor:
        """Computes the last layer's K and V. Returns what they are made of, [T, hidden], unchanged."""
        assert self._last is not None
        last = len(self._weights.layers) - 1
        k, v = self._last[1].forward(normed, turns[self._turn_of[last]], self._operations).chunk(2, dim=1)
        self._attention.write(plan, last, k, v)
        return normed

    def _by_rows(self, x: Tensor, body: Callable[[], Rows]) -> Rows:
        """Runs the part between two layers' attentions, by rows if it consists of kernels alone."""
        if not self._is_kernels:
            return body()
        return self._operations.by_rows(len(x), self._row_bytes, body)

    def _first(self, x: Tensor, turns: Turns, plan: Any) -> tuple[Tensor, ...]:
        """Runs the first layer up to its attention."""
        norm = self._weights.layers[0].input_norm
        normed = x if norm is None else self._operations.norm(x, norm, self._config.rms_norm_eps)
        return self._begin(0, normed, turns, plan)

    def _begin(self, index: int, normed: Tensor, turns: Turns, plan: Any) -> tuple[Tensor, ...]:
        """Runs a layer up to its attention. Returns q, k and v, [T, heads or kv_heads, head_dim]."""
        part = self._weights.layers[index].attention
        assert isinstance(part, GroupedAttention)
        write = self._rotate_and_write if part.rotates else self._only_write
        return part.begin(normed, turns[self._turn_of[index]], self._operations, partial(write, plan, index))

    def _attend(self, plan: Any, index: int, begun: tuple[Tensor, ...]) -> Tensor:
        """Returns what the queries of `_begin` found, [T, heads, head_dim]."""
        q, k, v = begun
        return self._attention.attend(plan, index, q, k, v)[0]

    def _rotate_then_write(
        self, plan: Any, index: int, heads: Tensor, cos: Tensor, signed_sin: Tensor, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Does the work of `Attention.rotate_and_write` by two operations."""
        config = self._config
        self._operations.rotate(heads[:, : config.num_heads + config.num_kv_heads], cos, signed_sin, weight, eps)
        return self._only_write(plan, index, heads, cos, signed_sin, None, eps)

    def _only_write(
        self, plan: Any, index: int, heads: Tensor, _cos: Tensor, _sin: Tensor, weight: Tensor | None, _eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Does the work of `Attention.rotate_and_write` in a layer without rope."""
        assert weight is None, "heads with norms are rotated"
        config = self._config
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        self._attention.write(plan, index, k, v)
        return q, k, v

    def _end(self, index: int, x: Tensor, attended: Tensor, then: Callable[[Tensor], Rows]) -> Rows:
        """Runs a layer from its attention on: adds to x, and returns what `then` makes of the output of the norm after
        the layer. An MLP that groups rows takes all of them at once.
        """
        mlp, operations = self._weights.layers[index].mlp, self._operations
        if not mlp.groups_rows:
            return self._by_rows(
                x, lambda: then(self._add(index, x, mlp.forward(self._end_attention(index, x, attended), operations)))
            )
        fed = mlp.forward(self._by_rows(x, partial(self._end_attention, index, x, attended)), operations)
        return self._by_rows(x, lambda: then(self._add(index, x, fed)))

    def _end_attention(self, index: int, x: Tensor, attended: Tensor) -> Tensor:
        """Runs a layer from its attention to its MLP: adds to x, and returns what the MLP gets."""
        layer = self._weights.layers[index]
        return self._add_normed(x, layer.attention.end(attended), layer.attended_norm, layer.mlp_norm)

    def _add(self, index: int, x: Tensor, fed: Tensor) -> Tensor:
        """Adds an MLP's output to x, and returns the output of the norm after the layer."""
        return self._add_normed(x, fed, self._weights.layers[index].fed_norm, self._norms_after[index])

    def _add_normed(self, x: Tensor, y: Tensor, norm: Tensor | None, next_norm: Tensor | None) -> Tensor:
        """Adds y to x, in place, after a norm of its own if there is one. Returns the next norm of the sum; without
        one, x.
        """
        operations, eps = self._operations, self._config.rms_norm_eps
        if next_norm is None:
            assert norm is not None, "a part has a norm before it or after it"
            assert self._config.residual_multiplier == 1, "what has no norm after it is added as it is"
            operations.add_normed(x, y, norm, eps)
            return x
        added = y if norm is None else operations.norm(y, norm, eps)
        return operations.add_norm(x, added, next_norm, eps, self._config.residual_multiplier)


def _unchanged(x: Tensor) -> Tensor:
    return x
