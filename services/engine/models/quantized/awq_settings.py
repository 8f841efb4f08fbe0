"""`quantization_config` of AWQ (Lin et al. 2024, arXiv 2306.00978), in AutoAWQ's form. Nothing here needs torch."""

from services.engine.models.quantized.patterns import excluded_modules
from services.engine.models.settings import ConfigSettings
from services.engine.quantization.int_layers import AwqLayer
from services.engine.quantization.schemes import Scheme

METHOD = "awq"
# They name kernels of other programs, or how AutoAWQ found the numbers.
_OF_OTHERS = (
    "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config", "backend", "tokenizer", "dataset", "sym",
    "model_seqlen", "damp_percent", "act_group_aware", "true_sequential", "meta", "block_name_to_quantize",
    "batch_size", "pad_token_id", "module_name_preceding_first_block", "max_input_length", "cache_block_outputs",
    "modules_in_block_to_quantize", "desc_act",
)  # fmt: skip


def read_awq(raw: ConfigSettings) -> Scheme:
    """Returns the ways of storing. Raises ModelError."""
    if raw.value("backend") == "llm-awq":
        raise raw.refusal("backend", "is not supported (only AutoAWQ's)")
    raw.disregard(*_OF_OTHERS)
    for key in ("version", "format"):
        if (form := raw.text(key)) is not None and form.lower() != "gemm":
            raise raw.refusal(key, "is not supported (only 'gemm')")
    for key in ("bits", "w_bit"):
        if raw.integer(key, 4) != 4:
            raise raw.refusal(key, "is not supported (only 4)")
    raw.require("zero_point", True)
    sizes = {key: read_group(raw, key) for key in ("group_size", "q_group_size") if raw.value(key) is not None}
    if len(set(sizes.values())) > 1:
        raise raw.refusal("q_group_size", "differs from group_size")
    layer = AwqLayer(group=next(iter(sizes.values()), 128))
    head = () if raw.flag("lm_head") else ("lm_head$",)
    return Scheme(METHOD, (("", layer),), (*excluded_modules(raw, "modules_to_not_convert"), *head))


def read_group(raw: ConfigSettings, key: str) -> int | None:
    """Returns the numbers of a row with one scale; None: all. Raises ModelError."""
    return None if raw.value(key) == -1 else raw.integer(key, 128)
