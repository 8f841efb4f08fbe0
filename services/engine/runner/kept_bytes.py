"""The memory that a model's weights take, in codes where a CPU's kernels multiply them so. Nothing here needs torch."""

from collections.abc import Mapping

from services.config import DeviceKind, Kernels, LoadFormat, Quantization
from services.config.engine import EngineConfig
from services.engine.kernels.cpu.availability import why_no_kernels
from services.engine.kernels.cpu.isa import IsaError
from services.engine.models.architectures import CodeBits, weight_bytes
from services.engine.models.linear_names import is_linear, is_of_all_experts
from services.engine.models.model_config import ModelConfig
from services.engine.quantization.schemes import Scheme
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.gguf_file import GgufFile
from services.protocol.model_files.open import open_model

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Bits that a number of a GGUF file takes in memory, with its part of scales and offsets, by the way of storing.
_GGUF_BITS = {
    "Q4_0": 5.0, "Q4_1": 5.0, "Q5_0": 8.5, "Q5_1": 9.0, "Q8_0": 8.5,
    "IQ4_NL": 8.5, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625,
}  # fmt: skip
_INT4_BITS = 5.0  # of `--quantization int4`


def kept_bytes(engine: EngineConfig, config: ModelConfig, dtype: str) -> int:
    """Returns the memory that the weights of one worker take, which computes in this dtype. Raises ModelError.

    It is an estimate where a checkpoint's settings do not say which of its layers are quantized.
    """
    try:
        return weight_bytes(config, ITEM_BYTES[dtype], _code_bits(engine, config, dtype))
    except IsaError as error:
        raise ModelError(str(error)) from error


def _code_bits(engine: EngineConfig, config: ModelConfig, dtype: str) -> CodeBits | None:
    """Returns what says the bits of each number that is kept in codes; None: none is."""
    if engine.device == DeviceKind.CUDA or engine.kernels == Kernels.TORCH or why_no_kernels(dtype) is not None:
        return None
    if engine.quantization in (Quantization.INT4, Quantization.INT8):
        is_int4 = engine.quantization == Quantization.INT4
        return lambda name, depth: _of_rounded(name, depth, is_int4=is_int4)
    if engine.load_format == LoadFormat.DUMMY:
        return None
    if config.scheme is not None:
        return _of_scheme(config.scheme)
    files = open_model(engine.model)
    return _of_gguf(files) if isinstance(files, GgufFile) else None


def _of_rounded(name: str, depth: int, *, is_int4: bool) -> float | None:
    if not is_linear(name) and not is_of_all_experts(name):
        return None
    return _INT4_BITS if is_int4 else 8 + 32 / depth


def _of_scheme(scheme: Scheme) -> CodeBits:
    def bits(name: str, depth: int) -> float | None:
        is_stored = is_linear(name) or is_of_all_experts(name)
        layer = scheme.layer(name.removesuffix(".weight")) if is_stored else None
        return None if layer is None else layer.kept_bits(depth)

    return bits


def _of_gguf(files: GgufFile) -> CodeBits:
    from services.engine.models.gguf_stored import read_stored  # the library for the format takes a moment

    kinds: Mapping[str, str] = {name: stored.quantization.name for name, stored in read_stored(files.header).items()}
    return lambda name, depth: _GGUF_BITS.get(kinds.get(name, ""))
