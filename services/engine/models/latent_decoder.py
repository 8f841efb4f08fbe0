"""The decoder of families with multi-head latent attention: another attention, all else as in `Decoder`."""

from functools import partial
from typing import Any, cast

from torch import Tensor

from services.engine.attention.base import Attention
from services.engine.attention.latent_base import AnyLatentAttention
from services.engine.kernels.base import Operations
from services.engine.models.config import DecoderConfig
from services.engine.models.decoder import Decoder, Turns
from services.engine.models.latent_attention import LatentAttentionPart
from services.engine.models.weights import DecoderWeights


class LatentDecoder(Decoder):
    """`Model` of decoders whose layers have a `LatentAttentionPart`."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, attention: AnyLatentAttention, operations: Operations
    ) -> None:
        # `Decoder` itself calls nothing of an attention that latent attention lacks: the methods below do.
        super().__init__(config, weights, cast(Attention[Any], attention), operations)
        self._latents = attention

    def _begin(self, index: int, normed: Tensor, turns: Turns, plan: Any) -> tuple[Tensor, ...]:
        """Runs a layer up to its attention. Returns q_nope and q_rope, [T, heads, nope_dim or rope_dim]."""
        turn, write = turns[self._turn_of[index]], partial(self._latents.write, plan, index)
        return self._part(index).begin(normed, turn, self._operations, write)

    def _attend(self, plan: Any, index: int, begun: tuple[Tensor, ...]) -> Tensor:
        """Returns what the queries of `_begin` found, [T, heads, value_dim]."""
        q_nope, q_rope = begun
        return self._latents.attend(plan, index, q_nope, q_rope, self._part(index).products)

    def _part(self, index: int) -> LatentAttentionPart:
        part = self._weights.layers[index].attention
        assert isinstance(part, LatentAttentionPart)
        return part
