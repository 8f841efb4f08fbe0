"""The memory of weights that is counted before they are read is what they take when they are there."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from services.config import Dtype, Kernels, Quantization
from services.config.engine import EngineConfig
from services.engine.kernels.load import why_not_fused
from services.engine.models.architectures import parse_model_config
from services.engine.models.registry import load_weights
from services.engine.runner.kept_bytes import kept_bytes
from services.engine.runner.load_plan import plan_load
from services.protocol.model_files.open import open_model
from tests.checkpoints import write_checkpoint
from tests.gguf_files import write_gguf
from tests.quantized_checkpoints import WAYS, write_mxfp4, write_quantized

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1}
GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")
OF_EXPERTS = {
    "mxfp4": "gpt_oss",
    "int4-in-one-tensor": "gpt_oss",
    "int4-of-experts": "mixtral",
    "int8-in-one-tensor": "gpt_oss",
    "int8-of-experts": "mixtral",
}
COMPRESSED = ("awq", "gptq-4", "gptq-4-ordered", "gptq-8", "w4a16", "w4a16-asymmetric", "w8a16", "fp8-blocks", "w8a8")


@pytest.mark.few(3)
@pytest.mark.parametrize("way", [*GGUF, *COMPRESSED, "int4", "int8", "none", *OF_EXPERTS])
@pytest.mark.parametrize("kernels", Kernels)
def test_what_is_counted_is_what_is_read(way: str, kernels: Kernels, tmp_path: Path) -> None:
    """Within the twentieth that small scales are."""
    path = write_checkpoint(tmp_path / "plain", OF_EXPERTS.get(way, "llama"), **WIDE)
    if way in GGUF:
        path = write_gguf(tmp_path / "model.gguf", path, GGMLQuantizationType[way])
    elif way in WAYS:
        write_quantized(path := tmp_path / "quantized", tmp_path / "plain", WAYS[way])
    elif way == "mxfp4":
        write_mxfp4(path := tmp_path / "quantized", tmp_path / "plain")
    at_load = (Quantization.INT4, Quantization.INT8)
    quantization = next((one for one in at_load if way.startswith(one)), Quantization.NONE)
    engine = EngineConfig(model=path, dtype=Dtype.BFLOAT16, kernels=kernels, quantization=quantization, num_threads=1)
    plan, read = plan_load(engine), Counter[str]()
    fused = kernels is Kernels.AUTO and why_not_fused("bfloat16") is None
    with plan.tensors() as tensors:
        load_weights(tensors, plan.config, plan.dtype, fused=fused, on_read=lambda size: read.update(bytes=size))
    counted = kept_bytes(engine, parse_model_config(open_model(path).config()), "bfloat16")
    assert abs(counted - read["bytes"]) <= counted / 20
