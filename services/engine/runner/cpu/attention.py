"""Chooses the attention of a model on a CPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.attention.cpu_attention import CpuAttention
from services.engine.attention.latent_cpu_attention import LatentCpuAttention
from services.engine.attention.row_attention import RowAttention
from services.engine.attention.sliced_attention import SlicedAttention
from services.engine.kernels.base import CodedKv, Scoring
from services.engine.models.config import DecoderConfig
from services.engine.models.kv_scales import KvScales
from services.engine.models.model_config import ModelConfig
from services.engine.runner.kv_storage import CODES


@dataclass(frozen=True, slots=True, eq=False)
class StoredKv:
    """The geometry of a model's blocks, and the scales of their numbers that are not in them."""

    layout: KvLayout
    scales: KvScales | None = None  # static ones of all layers, on the CPU, of e4m3 without `token_scales`

    def coded(self, dtype: torch.dtype) -> CodedKv | None:
        """Returns what attention has to know of a pool of codes; None: its numbers are of the model's dtype."""
        scales, layout = self.scales, self.layout
        if layout.dtype not in CODES.values():
            assert scales is None, "numbers that are no codes have no scales"
            return None
        assert (scales is None) == layout.token_scales, "scales are of tokens or static"
        return CodedKv(dtype, None if scales is None else torch.stack((scales.k, scales.v), dim=1))


def make_attention(
    pool: Tensor,
    layout: KvLayout,
    config: ModelConfig,
    sinks: Tensor | None,
    coded: CodedKv | None = None,
    *,
    fused: bool,
    before_layer: Callable[[], None],
) -> CpuAttention | LatentCpuAttention | RowAttention | SlicedAttention:
    """Makes the attention over a pool of the model's layout. before_layer: called once for each layer of a step.

    sinks: see `Scoring`. coded: of a pool of codes of one byte, see `StoredKv`.
    """
    if isinstance(config, DecoderConfig) and config.latent is not None:
        return LatentCpuAttention(pool, layout, config.num_heads, config.latent, fused=fused, before_layer=before_layer)
    if not config.is_causal:
        return RowAttention(config.num_kv_heads, config.scale, config.attention_reaches)

    def make(own_sinks: Tensor | None, own_coded: CodedKv | None) -> CpuAttention:
        scoring = Scoring(config.scale, config.attention_softcap, own_sinks)
        return CpuAttention(pool, layout, config.num_heads, scoring, own_coded, fused=fused, before_layer=before_layer)

    def make_slice(layers: tuple[int, ...]) -> CpuAttention:
        own, of_stage = coded, config.stage.layers
        # A place of another stage's layer gets numbers that nobody uses.
        here = [layer - of_stage.start if layer in of_stage else 0 for layer in layers]
        if coded is not None and coded.scales is not None:
            own = CodedKv(coded.dtype, coded.scales[here])
        return make(None if sinks is None else sinks[here], own)

    if layout.groups is None:
        return make(sinks, coded)
    return SlicedAttention(layout.groups, config.stage.layers, make_slice)
