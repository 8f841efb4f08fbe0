"""`quantization_config` of FP8 weights, as DeepSeek-V3 (arXiv 2412.19437, section 3.3) and vLLM store them.

Nothing here needs torch.
"""

from services.engine.models.quantized.patterns import excluded_modules
from services.engine.models.settings import ConfigSettings
from services.engine.quantization.float_layers import Float8Layer
from services.engine.quantization.schemes import Per, Scheme

METHOD = "fp8"
# They ask a program to unpack the weights, or name its kernels.
_OF_OTHERS = ("dequantize", "is_checkpoint_fp8_serialized")


def read_fp8(raw: ConfigSettings) -> Scheme:
    """Returns the ways of storing. Raises ModelError.

    The scales are there for each weight: one, one for each row, or one for each block. Activations are e4m3 as well.
    Static scales of activations are checked and not used: see `int_layers.input_parts`.
    """
    raw.disregard(*_OF_OTHERS)
    raw.require("fmt", "e4m3")
    raw.require("expert_dtype", "fp8")
    if raw.value("scale_fmt", "float") not in ("float", "ue8m0"):  # powers of two among the scales, which are floats
        raise raw.refusal("scale_fmt", "is not supported (supported: float, ue8m0)")
    if raw.value("is_checkpoint_fp8_serialized", True) is not True:
        raise raw.refusal("is_checkpoint_fp8_serialized", "contradicts weights that are quantized")
    if raw.text("activation_scheme", "dynamic") not in ("dynamic", "static"):
        raise raw.refusal("activation_scheme", "is not supported (supported: dynamic, static)")
    ends = (".weight_scale_inv", ".weight_scale")
    inputs = (".input_scale", ".activation_scale") if raw.text("activation_scheme") == "static" else ()
    if raw.value("weight_block_size") is None:
        layer = Float8Layer(pers=(Per.TENSOR, Per.ROW), scale_ends=ends, input_ends=inputs, float8_inputs=True)
    else:
        block = read_block(raw, "weight_block_size")
        layer = Float8Layer(pers=(Per.BLOCK,), block=block, scale_ends=ends[:1], input_ends=inputs, float8_inputs=True)
    if raw.value("modules_to_convert"):
        raise raw.refusal("modules_to_convert", "is not supported")
    return Scheme(METHOD, (("", layer),), excluded_modules(raw, "modules_to_not_convert", "ignored_layers"))


def read_block(raw: ConfigSettings, key: str) -> tuple[int, int]:
    """Returns the outputs and inputs of a rectangle with one scale. Raises ModelError."""
    sizes = raw.value(key)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise raw.refusal(key, "is no list of two sizes")
    return sizes[0], sizes[1]
