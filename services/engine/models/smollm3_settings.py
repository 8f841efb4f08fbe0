"""The settings of config.json that SmolLM3 alone has: layers without rope (Yang et al. 2025, arXiv 2501.18795)."""

from typing import Any

from services.engine.models.settings import ConfigSettings


def smollm3_settings(raw: ConfigSettings) -> dict[str, Any]:
    """Returns fields of `DecoderConfig`. Raises ModelError."""
    return {"layers_without_rope": layers_without_rope(raw)}


def layers_without_rope(raw: ConfigSettings) -> tuple[int, ...]:
    """Returns the layers without rope: those with 0 in `no_rope_layers`, or every n-th. Raises ModelError."""
    num_layers = raw.integer("num_hidden_layers")
    interval, marks = raw.integer("no_rope_layer_interval", 4), raw.value("no_rope_layers")
    if marks is None:
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(marks, list) or len(marks) < num_layers or not all(mark in (0, 1) for mark in marks):
        raise raw.refusal("no_rope_layers", f"is no list of a 0 or 1 for each of {num_layers} layers")
    return tuple(layer for layer in range(num_layers) if not marks[layer])
