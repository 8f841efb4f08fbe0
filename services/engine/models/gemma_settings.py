"""The settings of config.json that Gemma 2 and 3 alone have (Gemma Team, 2024, arXiv 2408.00118; 2025, 2503.19786).

A function returns fields of `DecoderConfig`.
"""

import math
from typing import Any

from services.engine.models.settings import ConfigSettings


def gemma2_settings(raw: ConfigSettings) -> dict[str, Any]:
    """Returns Gemma 2's scales and soft caps. Raises ModelError."""
    return _scales(raw) | {
        "attention_softcap": nullable_number(raw, "attn_logit_softcapping", 50.0),
        "final_softcap": nullable_number(raw, "final_logit_softcapping", 30.0),
    }


def gemma3_settings(raw: ConfigSettings) -> dict[str, Any]:
    """Returns Gemma 3's scales, and the soft cap of its logits. Raises ModelError: `transformers` gives attention no
    soft cap, whatever config.json says.
    """
    raw.require("attn_logit_softcapping", None)
    return _scales(raw) | {"final_softcap": nullable_number(raw, "final_logit_softcapping", None)}


def nullable_number(raw: ConfigSettings, key: str, default: float | None) -> float | None:
    """Returns a positive number, or None for null; the default if the setting is missing."""
    if raw.is_null(key):
        return None
    return default if raw.value(key) is None else raw.number(key)


def _scales(raw: ConfigSettings) -> dict[str, Any]:
    raw.require("hidden_activation", "gelu_pytorch_tanh")
    return {
        "embedding_scale": math.sqrt(raw.integer("hidden_size")),
        "attention_multiplier": 1 / math.sqrt(raw.number("query_pre_attn_scalar", 256.0)),
    }
