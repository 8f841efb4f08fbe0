"""`quantization_config` of compressed-tensors: groups of layers, each with a scheme for weights and activations.

The names and their meanings are those of the library's `QuantizationConfig`. Nothing here needs torch.
"""

import re

from services.engine.models.quantized.fp8_settings import read_block
from services.engine.models.quantized.patterns import checked
from services.engine.models.settings import ConfigSettings
from services.engine.quantization.float_layers import Float8Layer
from services.engine.quantization.int_layers import CompressedInts
from services.engine.quantization.schemes import LayerScheme, Per, Scheme

METHOD = "compressed-tensors"
_PACKED, _INTS = "pack-quantized", "int-quantized"
_NAIVE = "naive-quantized"  # older files: a byte each
_FLOATS = "float-quantized"
_FORMATS = (_PACKED, _INTS, _FLOATS, _NAIVE)
_BY_GROUP = "mixed-precision"  # of a file whose groups name their formats
_OF_LAYERS = "Linear"  # the class of modules that targets may name
# They say how the library found the numbers that are stored, or what is stored says it as well.
_MADE_BY = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_OF_FILES = ("quantization_status", "global_compression_ratio", "version")


def is_kv_only(raw: ConfigSettings) -> bool:
    """Returns True if quantization_config speaks of KV alone."""
    return (
        raw.text("quant_method") == METHOD and not raw.value("config_groups") and bool(raw.section("kv_cache_scheme"))
    )


def read_kv_scheme(raw: ConfigSettings) -> None:
    """Reads what quantization_config says of KV, whose scales `kv_scales.py` reads. Raises ModelError."""
    scheme = raw.section("kv_cache_scheme")
    if not scheme:
        return
    scheme.disregard(*_MADE_BY)
    found = (
        scheme.value("type"),
        scheme.value("num_bits"),
        scheme.value("symmetric", True),
        scheme.value("dynamic", False),
    )
    if found != ("float", 8, True, False):
        raise raw.refusal("kv_cache_scheme", "is not supported (only static symmetric scales of 8-bit floats)")


def read_compressed(raw: ConfigSettings) -> Scheme | None:
    """Returns the ways of storing; None: KV alone is quantized. Raises ModelError."""
    raw.disregard(*_OF_FILES)
    read_kv_scheme(raw)
    sparsity = raw.value("sparsity_config", {})
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise raw.refusal("sparsity_config", "is not supported")
    if is_kv_only(raw):
        raw.disregard("format", "ignore")
        return None
    groups = raw.section("config_groups")
    targets: list[tuple[str, LayerScheme]] = []
    for name in raw.value("config_groups", {}):
        group = groups.section(name)
        layer = _read_group(group, raw)
        patterns = group.texts("targets")
        if not patterns:
            raise group.refusal("targets", "names no layers")
        targets += [(target, layer) for target in patterns]
    if not targets:
        raise raw.refusal("config_groups", "says nothing of any layer")
    ignored = raw.texts("ignore")
    in_order = sorted(targets, key=lambda target: _rank(target[0]))
    return Scheme(
        METHOD,
        tuple((checked(_pattern(target), raw, "config_groups"), layer) for target, layer in in_order),
        tuple(checked(_pattern(name), raw, "ignore") for name in ignored),
    )


def _rank(target: str) -> tuple[int, str]:
    """Returns the place of a target among those that match a layer: names, then patterns, then classes."""
    return (2 if target == _OF_LAYERS else 1 if target.startswith("re:") else 0), target


def _pattern(target: str) -> str:
    if target == _OF_LAYERS:
        return ""
    return target.removeprefix("re:") if target.startswith("re:") else re.escape(target) + "$"


def _read_group(group: ConfigSettings, whole: ConfigSettings) -> LayerScheme:
    """Returns the way in which a group's layers are stored. Raises ModelError."""
    stored_as = group.text("format", whole.text("format"))
    if whole.text("format") == _BY_GROUP and group.value("format") is None:
        raise group.refusal("format", f"is missing, for {_BY_GROUP}")
    if group.value("output_activations") is not None:
        raise group.refusal("output_activations", "is not supported")
    weights = group.section("weights")
    if not weights:
        raise group.refusal("weights", "is missing")
    kind = weights.text("type", "int")
    if stored_as in (_PACKED, _INTS, _NAIVE) and kind == "int":
        return _read_ints(group, weights, is_packed=stored_as == _PACKED)
    if stored_as in (_FLOATS, _NAIVE) and kind == "float":
        return _read_floats(group, weights)
    if stored_as in _FORMATS:
        raise weights.refusal("type", f"contradicts the format, {stored_as}")
    raise (group if group.value("format") else whole).refusal(
        "format", f"is not supported (supported: {', '.join(_FORMATS)})"
    )


def _read_ints(group: ConfigSettings, weights: ConfigSettings, *, is_packed: bool) -> CompressedInts:
    bits = weights.integer("num_bits", 8)
    if bits not in ((4, 8) if is_packed else (8,)):
        raise weights.refusal("num_bits", f"is not supported (supported: {'4, 8' if is_packed else '8'})")
    per, size = read_scope(weights, (Per.TENSOR, Per.ROW, Per.GROUP))
    order = weights.value("actorder")
    if order not in (None, False, True, "group", "weight", "static", "dynamic"):
        raise weights.refusal("actorder", "is not supported (supported: group, weight)")
    is_ordered = order in (True, "group", "dynamic")
    if is_ordered and per is not Per.GROUP:
        raise weights.refusal("actorder", "is for groups alone")
    inputs = read_inputs(group, "int")
    return CompressedInts(
        bits=bits,
        is_packed=is_packed,
        per=per,
        group=size,
        is_symmetric=weights.flag("symmetric", True),
        is_ordered=is_ordered,
        int8_inputs=inputs is not None and inputs.value("symmetric", True) is True,
        static_inputs=inputs is not None and inputs.value("dynamic", False) is False,
    )


def _read_floats(group: ConfigSettings, weights: ConfigSettings) -> Float8Layer:
    if weights.integer("num_bits", 8) != 8:
        raise weights.refusal("num_bits", "is not supported (supported: 8)")
    weights.require("symmetric", True)
    weights.require("actorder", None)
    per, _ = read_scope(weights, (Per.TENSOR, Per.ROW, Per.BLOCK))
    block = read_block(weights, "block_structure") if per is Per.BLOCK else None
    inputs = read_inputs(group, "float")
    is_static = inputs is not None and inputs.value("dynamic", False) is False
    ends = (".input_scale",) if is_static else ()
    return Float8Layer(pers=(per,), block=block, input_ends=ends, float8_inputs=inputs is not None)


def read_scope(weights: ConfigSettings, supported: tuple[Per, ...]) -> tuple[Per, int | None]:
    """Returns which numbers of a weight share a scale, and the size of a group. Raises ModelError."""
    weights.disregard(*_MADE_BY)
    size = weights.value("group_size")
    name = weights.text("strategy", _usual_scope(size))
    if name not in supported:
        raise weights.refusal("strategy", f"is not supported (supported: {', '.join(supported)})")
    weights.require("dynamic", False)
    per = Per(name)
    if per is not Per.BLOCK and weights.value("block_structure") is not None:
        raise weights.refusal("block_structure", f"contradicts strategy {per}")
    if per is Per.GROUP:
        return per, weights.integer("group_size")
    if size not in (None, -1):
        raise weights.refusal("group_size", f"contradicts strategy {per}")
    return per, None


def _usual_scope(size: object) -> str:
    return Per.TENSOR if size is None else Per.ROW if size == -1 else Per.GROUP


def read_inputs(group: ConfigSettings, kind: str) -> ConfigSettings | None:
    """Returns what is said of activations, which are numbers of 8 bits; None: they are as they come. Raises ModelError.

    Their scales are made for each token, whatever is said of them: no other is nearer to the activations.
    """
    inputs = group.section("input_activations")
    if not inputs:
        return None
    inputs.disregard(*_MADE_BY, "strategy", "group_size", "block_structure")
    if (inputs.value("type", "int"), inputs.value("num_bits", 8)) != (kind, 8):
        raise group.refusal("input_activations", f"is not supported (only {kind} of 8 bits)")
    if inputs.value("actorder") is not None:
        raise inputs.refusal("actorder", "is for weights alone")
    if inputs.value("dynamic", False) not in (True, False) or inputs.value("symmetric", True) not in (True, False):
        raise inputs.refusal("dynamic", "or symmetric is neither true nor false")
    return inputs
