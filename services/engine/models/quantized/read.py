"""`quantization_config` of config.json, of any method. Nothing here needs torch."""

from collections.abc import Callable

from services.engine.models.quantized import (
    awq_settings,
    compressed_settings,
    fp8_settings,
    gptq_settings,
    mxfp4_settings,
)
from services.engine.models.settings import ConfigSettings
from services.engine.quantization.schemes import Scheme
from services.protocol.model_files.base import ModelError

_METHODS: dict[str, Callable[[ConfigSettings], Scheme | None]] = {
    compressed_settings.METHOD: compressed_settings.read_compressed,
    awq_settings.METHOD: awq_settings.read_awq,
    gptq_settings.METHOD: gptq_settings.read_gptq,
    fp8_settings.METHOD: fp8_settings.read_fp8,
    mxfp4_settings.METHOD: mxfp4_settings.read_mxfp4,
}


def read_scheme(config: ConfigSettings) -> Scheme | None:
    """Returns the ways in which the weights are stored that config.json describes; None: as numbers. Raises ModelError,
    for a setting too that is not supported; `ConfigSettings.unread` has those that nobody knows.
    """
    raw = config.section("quantization_config")
    if not raw:
        return None
    method = raw.text("quant_method")
    if method not in _METHODS:
        raise ModelError(
            f"config.json: quantization_config is not supported (quant_method {method or 'unknown'!r}; supported: "
            f"{', '.join(_METHODS)})"
        )
    return _METHODS[method](raw)
