"""Chooses the attention of a model on a GPU."""

import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.attention.latent_triton_attention import LatentTritonAttention
from services.engine.attention.staging import Staging
from services.engine.attention.triton_attention import Fp8Kv, TritonAttention, WorkCut
from services.engine.kernels.base import Scoring
from services.engine.models.base import Weights
from services.engine.models.config import DecoderConfig
from services.engine.models.kv_scales import KvScales
from services.engine.models.model_config import ModelConfig


def make_attention(
    pool: Tensor,
    layout: KvLayout,
    model: tuple[ModelConfig, Weights],
    kv_scales: KvScales | None,
    *,
    staging: Staging,
    cut: WorkCut,
    max_num_batched_tokens: int,
) -> TritonAttention | LatentTritonAttention:
    """Makes the attention over a pool of the model's layout. kv_scales: present if the layout's dtype is
    float8_e4m3fn. Raises UnsupportedShape.
    """
    config, weights = model
    if isinstance(config, DecoderConfig) and config.latent is not None:
        assert kv_scales is None, "there are no kernels for latents in FP8"
        # A step has as many keys as tokens where no prefix is cached: more keys at once would take more memory than the
        # largest trial step.
        return LatentTritonAttention(
            pool, layout, config.num_heads, config.latent, staging=staging, cut=cut, most_keys=max_num_batched_tokens
        )
    fp8 = None
    if kv_scales is not None:
        fp8 = Fp8Kv(torch.stack((kv_scales.k, kv_scales.v), dim=1).to(pool.device), weights.dtype)
    scoring = Scoring(config.scale, config.attention_softcap, weights.sinks)
    return TritonAttention(pool, layout, config.num_heads, scoring, staging=staging, cut=cut, fp8=fp8)
