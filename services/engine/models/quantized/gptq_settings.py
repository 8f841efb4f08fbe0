"""`quantization_config` of GPTQ (Frantar et al. 2023, arXiv 2210.17323), as AutoGPTQ and GPTQModel write it. Nothing
here needs torch.
"""

import re

from services.engine.models.quantized.awq_settings import read_group
from services.engine.models.quantized.patterns import excluded_modules
from services.engine.models.settings import ConfigSettings
from services.engine.quantization.int_layers import GptqLayer
from services.engine.quantization.schemes import Scheme

METHOD = "gptq"
_FORMATS = {"gptq": 1, "gptq_v2": 0}  # and what is added to stored zero points
# They say how the numbers were found, with which data, and by which kernels other programs compute.
_OF_OTHERS = (
    "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "act_group_aware", "hyb_act", "mse",
    "model_name_or_path", "model_file_base_name", "meta", "dataset", "tokenizer", "use_cuda_fp16", "model_seqlen",
    "block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "pad_token_id", "use_exllama",
    "disable_exllama", "exllama_config", "max_input_length", "cache_block_outputs", "backend", "v2", "v2_alpha",
    "v2_memory_device", "parallel_packing", "offload_to_disk", "offload_to_disk_path", "fail_safe", "failsafe",
    "version", "quant_type",
)  # fmt: skip


def read_gptq(raw: ConfigSettings) -> Scheme:
    """Returns the ways of storing. Raises ModelError."""
    raw.disregard(*_OF_OTHERS)
    bits = raw.integer("bits")
    if bits not in (4, 8):
        raise raw.refusal("bits", "is not supported (supported: 4, 8)")
    if raw.value("dynamic"):
        raise raw.refusal("dynamic", "is not supported: all layers must be stored in the same way")
    raw.require("is_marlin_format", False)
    raw.require("pack_dtype", "int32")
    names = {key: raw.text(key) for key in ("checkpoint_format", "format") if raw.value(key) is not None}
    for key, name in names.items():
        if name not in _FORMATS:
            raise raw.refusal(key, f"is not supported (supported: {', '.join(_FORMATS)})")
    if len(set(names.values())) > 1:
        raise raw.refusal("format", "differs from checkpoint_format")
    layer = GptqLayer(
        bits=bits,
        group=read_group(raw, "group_size"),
        is_symmetric=raw.flag("sym", True),
        is_ordered=raw.flag("desc_act"),
        zero_shift=_FORMATS[next(iter(names.values()), None) or "gptq"],
    )
    has_head, patterns = raw.flag("lm_head"), _targets(raw)
    targets = [*(("lm_head$", layer) for _ in range(has_head)), *((pattern, layer) for pattern in patterns)]
    excluded = excluded_modules(raw, "modules_to_not_convert")
    return Scheme(METHOD, tuple(targets), excluded if has_head else (*excluded, "lm_head$"))


def _targets(raw: ConfigSettings) -> list[str]:
    """Returns patterns of the layers that are quantized."""
    lists = raw.value("modules_in_block_to_quantize")
    if lists is None:
        return [""]
    of_lists = isinstance(lists, list) and all(isinstance(each, list) for each in lists)
    flat = [name for each in lists for name in each] if of_lists else []
    if not flat or not all(isinstance(name, str) for name in flat):
        raise raw.refusal("modules_in_block_to_quantize", "is no list of lists of layers")
    return [rf".*\.{re.escape(name)}$" for name in flat]
