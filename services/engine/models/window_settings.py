"""Sliding windows of a model's layers, read from config.json: one for all layers, or one for each."""

from collections.abc import Callable
from dataclasses import dataclass

from services.engine.models.settings import ConfigSettings
from services.engine.models.smollm3_settings import layers_without_rope
from services.protocol.model_files.base import ModelError

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Windows:
    """Positions that a token sees, its own included; None: all before it."""

    widest: int | None = None  # of all layers: KV before it is needed by none
    of_layers: tuple[int | None, ...] = ()  # of each layer; empty: all have the widest


def no_window(raw: ConfigSettings) -> Windows:
    """Returns no window: every layer sees all earlier tokens."""
    raw.require("use_sliding_window", False)
    raw.disregard("max_window_layers")
    window = raw.nullable_integer("sliding_window")
    if window is not None and window < raw.integer("max_position_embeddings"):
        raise raw.refusal("sliding_window", "is not supported for this architecture")
    _require_layer_types(raw, _FULL)
    return Windows()


def window_of_all_layers(raw: ConfigSettings, default: int | None = 4096) -> Windows:
    """Returns Mistral's window: `sliding_window`, null for none."""
    window = raw.nullable_integer("sliding_window", default)
    raw.require("use_sliding_window", window is not None)
    raw.disregard("max_window_layers")
    _require_layer_types(raw, _FULL if window is None else _SLIDING)
    return Windows(window)


def window_shorter_than_context(raw: ConfigSettings) -> Windows:
    """Returns Phi-3's window: `sliding_window` in all layers, if it hides anything."""
    window = window_of_all_layers(raw, default=None).widest
    return Windows(None if window is None or window >= raw.integer("max_position_embeddings") else window)


def window_if_used(raw: ConfigSettings) -> Windows:
    """Returns the window of Qwen3-MoE: `sliding_window` in all layers, if `use_sliding_window` says so."""
    raw.disregard("sliding_window", "max_window_layers")
    window = raw.nullable_integer("sliding_window", 4096) if raw.flag("use_sliding_window") else None
    _require_layer_types(raw, _FULL if window is None else _SLIDING)
    return Windows(window)


def slides_from(layer: int, first: int) -> bool:
    """Returns True for the layers of Qwen that have a window: those from `max_window_layers` on."""
    return layer >= first


def slides_by_turns(layer: int, end: int) -> bool:
    """Returns True for the layers of Qwen2-MoE that have a window: every second one before `max_window_layers`."""
    return layer % 2 == 0 and layer < end


def windows_of_marked_layers(raw: ConfigSettings, slides: Callable[[int, int], bool] = slides_from) -> Windows:
    """Returns Qwen's windows, if `use_sliding_window` says so, for layers by `layer_types`, or by `slides` of a layer
    and `max_window_layers`.
    """
    raw.disregard("sliding_window", "max_window_layers")
    window = raw.nullable_integer("sliding_window", 4096) if raw.flag("use_sliding_window") else None
    if window is None:
        _require_layer_types(raw, _FULL)
        return Windows()
    num_layers, most = raw.integer("num_hidden_layers"), raw.integer("max_window_layers", 28, least=0)
    derived = [_SLIDING if slides(layer, most) else _FULL for layer in range(num_layers)]
    return _of_types(raw, layer_types(raw) or derived, window)


def windows_of_layers_without_rope(raw: ConfigSettings) -> Windows:
    """Returns SmolLM3's windows, if `use_sliding_window` says so, by `layer_types`, or of layers without rope."""
    raw.disregard("sliding_window", "max_window_layers")
    window = raw.nullable_integer("sliding_window") if raw.flag("use_sliding_window") else None
    if window is None:
        _require_layer_types(raw, _FULL)
        return Windows()
    num_layers, without = raw.integer("num_hidden_layers"), layers_without_rope(raw)
    derived = [_SLIDING if layer in without else _FULL for layer in range(num_layers)]
    return _of_types(raw, layer_types(raw) or derived, window)


def windows_of_typed_layers(raw: ConfigSettings) -> Windows:
    """Returns Ministral's windows: `sliding_window` for the layers that `layer_types` names so, by default for all."""
    window = raw.nullable_integer("sliding_window", 4096)
    derived = [_FULL if window is None else _SLIDING] * raw.integer("num_hidden_layers")
    return _of_types(raw, layer_types(raw) or derived, window)


def windows_by_turns(raw: ConfigSettings, default: int = 4096, every: int = 2, key: str | None = None) -> Windows:
    """Returns the windows of Gemma and gpt-oss: `sliding_window` in the layers that `layer_types` names so, by default
    in all but every `every`-th one. key: the setting that says how many, if the family heeds one.
    """
    window, num_layers = raw.nullable_integer("sliding_window", default), raw.integer("num_hidden_layers")
    if key is not None:
        every = raw.integer(key, every)
        raw.disregard(f"_{key}")
    derived = [_SLIDING if (layer + 1) % every else _FULL for layer in range(num_layers)]
    return _of_types(raw, layer_types(raw) or derived, window)


def layer_types(raw: ConfigSettings) -> list[str]:
    """Returns the kind of each layer, nothing if config.json does not name them. Raises ModelError."""
    kinds = raw.texts("layer_types")
    if kinds and len(kinds) != (num_layers := raw.integer("num_hidden_layers")):
        raise ModelError(f"config.json: layer_types has {len(kinds)} kinds, but num_hidden_layers is {num_layers}")
    return kinds


def _of_types(raw: ConfigSettings, kinds: list[str], window: int | None) -> Windows:
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise ModelError(f"config.json: layer_types with {kind!r} is not supported (only {_FULL!r}, {_SLIDING!r})")
    if window is None and _SLIDING in kinds:
        raise raw.refusal("sliding_window", f"contradicts layer_types, which has {_SLIDING!r}")
    of_layers = tuple(window if kind == _SLIDING else None for kind in kinds)
    if len(set(of_layers)) == 1:
        return Windows(of_layers[0])
    return Windows(None, of_layers)


def _require_layer_types(raw: ConfigSettings, only: str) -> None:
    for kind in layer_types(raw):
        if kind != only:
            raise ModelError(f"config.json: layer_types with {kind!r} is not supported (only {only!r} here)")
