"""Chooses the attention of a model on a CPU."""

from collections.abc import Callable

from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.attention.cpu_attention import CpuAttention
from services.engine.attention.latent_cpu_attention import LatentCpuAttention
from services.engine.attention.row_attention import RowAttention
from services.engine.attention.sliced_attention import SlicedAttention
from services.engine.kernels.base import Scoring
from services.engine.models.config import DecoderConfig
from services.engine.models.model_config import ModelConfig


def make_attention(
    pool: Tensor,
    layout: KvLayout,
    config: ModelConfig,
    sinks: Tensor | None,
    *,
    fused: bool,
    before_layer: Callable[[], None],
) -> CpuAttention | LatentCpuAttention | RowAttention | SlicedAttention:
    """Makes the attention over a pool of the model's layout. before_layer: called once for each layer of a step.

    sinks: see `Scoring`.
    """
    if isinstance(config, DecoderConfig) and config.latent is not None:
        return LatentCpuAttention(pool, layout, config.num_heads, config.latent, fused=fused, before_layer=before_layer)
    if not config.is_causal:
        return RowAttention(config.num_kv_heads, config.scale, config.attention_reaches)

    def make(own_sinks: Tensor | None) -> CpuAttention:
        scoring = Scoring(config.scale, config.attention_softcap, own_sinks)
        return CpuAttention(pool, layout, config.num_heads, scoring, fused=fused, before_layer=before_layer)

    if layout.groups is None:
        return make(sinks)
    return SlicedAttention(layout.groups, lambda layers: make(None if sinks is None else sinks[list(layers)]))
