"""The settings of config.json that Granite alone has: factors on what its parts compute, all 1 by default."""

from typing import Any

from services.engine.models.settings import ConfigSettings


def granite_settings(raw: ConfigSettings) -> dict[str, Any]:
    """Returns fields of `DecoderConfig`. Raises ModelError."""
    return {
        "embedding_scale": raw.number("embedding_multiplier", 1.0),
        "rounds_embedding_scale": False,
        "attention_multiplier": raw.number("attention_multiplier", 1.0),
        "residual_multiplier": raw.number("residual_multiplier", 1.0),
        "logits_scaling": raw.number("logits_scaling", 1.0),
    }
