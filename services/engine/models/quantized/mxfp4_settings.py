"""`quantization_config` of gpt-oss' experts in MXFP4. Nothing here needs torch."""

from services.engine.models.quantized.patterns import excluded_modules
from services.engine.models.settings import ConfigSettings
from services.engine.quantization.float_layers import Mxfp4Experts
from services.engine.quantization.schemes import Scheme

METHOD = "mxfp4"


def read_mxfp4(raw: ConfigSettings) -> Scheme:
    """Returns the ways of storing. Raises ModelError."""
    raw.disregard("dequantize")  # it asks a program to unpack the weights
    return Scheme(METHOD, (("", Mxfp4Experts()),), excluded_modules(raw, "modules_to_not_convert"))
