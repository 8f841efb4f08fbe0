"""Static scales of FP8 KV, from checkpoints that were calibrated for it.

A key or value is stored as value / scale in float8 e4m3, and read as stored * scale. A checkpoint may have scales for K
and for V, one for each layer or one for each KV head of a layer; a missing scale is 1.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.engine.models.model_config import ModelConfig
from services.engine.models.tensor_source import TensorSource
from services.protocol.model_files.base import ModelError

# The names in compressed-tensors, ModelOpt and vLLM.
_NAME = re.compile(r"\.layers\.(\d+)\.self_attn\.(?:attn\.)?(?:(k)_proj\.k|(v)_proj\.v|([kv]))_scale$")


@dataclass(frozen=True, slots=True, eq=False)
class KvScales:
    """The scales of K and of V, float32[num_layers, num_kv_heads] each, on the CPU. A rank has those of its heads."""

    k: Tensor
    v: Tensor

    def values(self) -> list[Any]:
        """Returns the scales as plain numbers, K before V."""
        return [self.k.tolist(), self.v.tolist()]


def is_kv_scale(name: str, config: ModelConfig) -> bool:
    """Returns True for a tensor that is a scale of this model's KV."""
    found = _place(name)
    return found is not None and found[1] < config.num_layers


def read_kv_scales(source: TensorSource, config: ModelConfig) -> KvScales | None:
    """Returns all scales; None if the checkpoint has none at all. Raises ModelError."""
    names = _by_place(source, config)
    if not names:
        return None
    scales = {kind: torch.ones(config.num_layers, config.num_kv_heads) for kind in "kv"}
    for (kind, layer), name in names.items():
        scales[kind][layer] = _read(source, name, config)
    return KvScales(scales["k"], scales["v"])


def unit_scales(config: ModelConfig) -> KvScales:
    """Returns scales of 1, for a model without calibration."""
    return KvScales(*(torch.ones(config.num_layers, config.num_kv_heads) for _ in "kv"))


def _by_place(source: TensorSource, config: ModelConfig) -> dict[tuple[str, int], str]:
    names: dict[tuple[str, int], str] = {}
    for name in sorted(source.names):
        if not is_kv_scale(name, config):
            continue
        place = _place(name)
        assert place is not None
        if place in names:
            raise ModelError(f"{source.home(name)}: tensor {name} is a scale that {names[place]} is already")
        names[place] = name
    return names


def _place(name: str) -> tuple[str, int] | None:
    """Returns "k" or "v", and the layer; None: the name is not a scale's."""
    match = _NAME.search(name)
    return None if match is None else (match[2] or match[3] or match[4], int(match[1]))


def _read(source: TensorSource, name: str, config: ModelConfig) -> Tensor:
    """Returns a scale's numbers, [1] or [num_kv_heads]."""
    num_kv_heads = config.whole.num_kv_heads
    source.dtype(name)  # raises if it is not of a floating-point dtype
    scale = source.read(name, torch.float32).flatten().cpu()
    if len(scale) not in (1, num_kv_heads):
        raise ModelError(
            f"{source.home(name)}: tensor {name} has {len(scale)} scales, 1 or one for each of {num_kv_heads} KV heads "
            "was expected"
        )
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ModelError(f"{source.home(name)}: tensor {name} has a scale that is not a positive number")
    if config.sharded is None or len(scale) == 1:
        return scale
    heads = config.sharded.kv_heads
    return scale[heads.start : heads.stop]
