"""Checks of the tensors of a quantized layer: their shapes and dtypes, and that scales and zero points can be meant."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from services.engine.models.quantized.matrices import ReadPart
from services.engine.quantization.float_layers import Float8Layer
from services.engine.quantization.int_layers import CompressedInts, GptqLayer
from services.engine.quantization.packed_ints import unpacked
from services.engine.quantization.schemes import LayerScheme, Part, Per
from services.protocol.model_files.base import ModelError

# The dtype and shape of a layer's tensor, by the end of its name; None: it is not there.
Describe = Callable[[str], tuple[str, tuple[int, ...]] | None]
_SCALES = (".scales", ".weight_scale", ".weight_scale_inv", ".input_scale", ".activation_scale")


def check_parts(name: str, parts: Mapping[str, Part], describe: Describe) -> None:
    """Raises ModelError for a tensor of a layer that is missing, of another shape or another dtype."""
    for end, part in parts.items():
        found = describe(end)
        if found is None:
            if part.is_required:
                raise ModelError(f"tensor {name}{end} is missing, {name} is quantized")
            continue
        dtype, shape = found
        if dtype not in part.dtypes:
            raise ModelError(f"tensor {name}{end} is stored as {dtype}, {' or '.join(part.dtypes)} was expected")
        if shape not in part.shapes:
            expected = " or ".join(str(list(shape)) for shape in part.shapes)
            raise ModelError(f"tensor {name}{end} has shape {list(shape)}, quantization_config asks for {expected}")


def check_values(name: str, layer: LayerScheme, part: ReadPart, out: int, depth: int) -> None:
    """Raises ModelError for scales that are not finite, zero points of symmetric numbers, groups that are not there."""
    for end in layer.parts(out, depth):
        scales = part(end, None, None) if end in _SCALES else None
        if scales is not None and not bool(torch.isfinite(scales.to(torch.float32)).all()):
            raise ModelError(f"tensor {name}{end} has a scale that is not finite")
    match layer:
        case GptqLayer():
            _check_gptq(name, layer, part, depth)
        case CompressedInts():
            _check_compressed(name, layer, part, out, depth)
        case Float8Layer():
            found = [end for end in layer.scale_ends if part(end, None, None) is not None]
            if len(found) != 1:
                ends = " or ".join(f"{name}{end}" for end in layer.scale_ends)
                raise ModelError(
                    f"{name} is quantized and has {len(found)} tensors of scales, one was expected: {ends}"
                )


def _check_gptq(name: str, layer: GptqLayer, part: ReadPart, depth: int) -> None:
    zeros = part(".qzeros", None, None)
    assert zeros is not None
    if layer.is_symmetric and bool(
        (unpacked(zeros, layer.bits, 1) != (1 << (layer.bits - 1)) - layer.zero_shift).any()
    ):
        raise ModelError(f"tensor {name}.qzeros has zero points that contradict sym, which is true")
    if (groups := part(".g_idx", None, None)) is not None:
        group = depth if layer.group is None else layer.group
        _check_groups(f"{name}.g_idx", groups, group, depth)
        if not layer.is_ordered and not torch.equal(groups.cpu(), torch.arange(depth, dtype=groups.dtype) // group):
            raise ModelError(f"tensor {name}.g_idx has an order of inputs that contradicts desc_act, which is false")


def _check_compressed(name: str, layer: CompressedInts, part: ReadPart, out: int, depth: int) -> None:
    if layer.is_packed and (shape := part(".weight_shape", None, None)) is not None and shape.tolist() != [out, depth]:
        raise ModelError(f"tensor {name}.weight_shape is {shape.tolist()}, config.json asks for {[out, depth]}")
    if layer.is_ordered:
        groups = part(".weight_g_idx", None, None)
        assert groups is not None
        assert layer.group is not None
        _check_groups(f"{name}.weight_g_idx", groups, layer.group, depth)
    zeros = part(".weight_zero_point", None, None)
    if layer.is_symmetric and zeros is not None and bool(_compressed_zeros(layer, zeros, out).any()):
        raise ModelError(f"tensor {name}.weight_zero_point contradicts symmetric, which is true")


def _compressed_zeros(layer: CompressedInts, stored: Tensor, out: int) -> Tensor:
    """Returns zero points, as signed numbers."""
    if layer.is_packed and layer.per is not Per.TENSOR:
        return unpacked(stored, layer.bits, 0)[:out].to(torch.int32) - (1 << (layer.bits - 1))
    return stored


def _check_groups(name: str, groups: Tensor, group: int, depth: int) -> None:
    last = -(-depth // group) - 1
    if bool(((groups < 0) | (groups > last)).any()):
        raise ModelError(f"tensor {name} names a group that is not there: there are {last + 1}")
