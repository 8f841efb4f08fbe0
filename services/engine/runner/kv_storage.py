"""The numbers in which KV is stored, by configuration: of the model's dtype, or codes of one byte."""

from services.config import KvCacheDtype
from services.config.engine import EngineConfig
from services.engine.models.model_config import ModelConfig
from services.protocol.model_files.base import ModelError

CODES = {KvCacheDtype.FP8: "float8_e4m3fn", KvCacheDtype.INT8: "int8"}


def stored_as(engine: EngineConfig, dtype: str, *, has_scales: bool = False, on_gpu: bool) -> tuple[str, bool]:
    """Returns the dtype of stored KV, and whether its tokens have scales of their own.

    dtype: the model's. has_scales: the checkpoint has static scales. Such scales are for e4m3: int8 has its own.
    """
    codes = CODES.get(engine.kv_cache_dtype)
    if codes is None:
        return dtype, False
    return codes, not on_gpu and not (has_scales and engine.kv_cache_dtype is KvCacheDtype.FP8)


def check_kv(
    engine: EngineConfig, config: ModelConfig, dtype: str, *, on_gpu: bool, why_no_kernels: str | None
) -> None:
    """Raises ModelError for KV that this device does not store so, or not of this model.

    dtype: the model's. why_no_kernels: the reason why a CPU's kernels do not run; None: they do.
    """
    if engine.kv_cache_dtype is KvCacheDtype.AUTO:
        return
    option = f"--kv-cache-dtype {engine.kv_cache_dtype}"
    if not config.is_causal:
        raise ModelError(f"{option} is for models that generate: this one makes embeddings, and keeps no KV")
    if config.num_planes == 1:
        raise ModelError(f"{option} is not there for latent KV yet: leave it out")
    if on_gpu:
        if engine.kv_cache_dtype is KvCacheDtype.INT8:
            raise ModelError(f"{option} is for the CPU alone: the device is a GPU")
        if dtype == "float32":
            raise ModelError(f"{option} needs a model in bfloat16 or float16 on a GPU, not float32")
    elif why_no_kernels is not None:
        raise ModelError(f"{option} needs kernels on a CPU: {why_no_kernels}")
