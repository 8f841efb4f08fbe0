"""Products of codes as Llama 3 8B and Qwen3-30B-A3B have them, for few rows and for many."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from services.engine.kernels.gpu.coded_experts import CodedStacks, grouped_coded_mlp
from services.engine.kernels.gpu.coded_product import multiply_into
from services.engine.kernels.gpu.coded_tile import Rows
from services.engine.kernels.gpu.packed_codes import PackedCodes
from services.engine.kernels.gpu.rows import quantize_rows
from services.engine.quantization.codes import Code, Inputs
from tests.gpu.compiled import Variant, of_launch

_OUT, _DEPTH = 4096, 4096
_ALL = (80, 90)


def variants() -> list[Variant]:
    """See `tests.gpu.compiled`."""
    found = [*_of_experts(), *_of_rows()]
    for num_rows in (16, 64, 4096):
        for code, group, has_offsets in (
            (Code.UINT4, 32, False),
            (Code.UINT4, 32, True),
            (Code.UINT4, 128, True),
            (Code.UINT4, _DEPTH, False),
            (Code.E2M1, 32, False),
            (Code.E4M3, 128, False),
            (Code.E4M3, _DEPTH, False),
            (Code.INT8, 32, False),
            (Code.INT8, _DEPTH, False),
        ):
            name = f"codes, {num_rows} rows, {code.value} by {group}{' with offsets' if has_offsets else ''}"
            launch = partial(_multiply, num_rows, code, group, has_offsets=has_offsets)
            found += of_launch(name, launch, _ALL if code is Code.UINT4 and group == 32 else (90,))
        for code, dtype, group in (
            (Code.INT8, torch.int8, _DEPTH),
            (Code.UINT4, torch.int8, 64),
            (Code.E4M3, torch.float8_e4m3fn, _DEPTH),
            (Code.E4M3, torch.float8_e4m3fn, 128),
        ):
            name = f"codes, {num_rows} rows of {str(dtype).removeprefix('torch.')}, {code.value} by {group}"
            found += of_launch(name, partial(_multiply, num_rows, code, group, dtype))
    found += of_launch(
        "codes, 16 rows of float32", partial(_multiply, 16, Code.UINT4, 32, torch.float32, has_offsets=True)
    )
    return [
        *found,
        *of_launch("codes, 4096 rows of float32", partial(_multiply, 4096, Code.E4M3, 128, torch.float32)),
        *of_launch("codes, 4096 rows of float16", partial(_multiply, 4096, Code.E2M1, 32, torch.float16)),
    ]


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def packed(code: Code, shape: tuple[int, int], group: int, *, of_bytes: bool, has_offsets: bool) -> PackedCodes:
    """Returns a matrix without memory. of_bytes: inputs have one byte."""
    out, depth = shape
    step = min(group, 128 if of_bytes and code.bits == 8 else 64)
    scales = _empty(-(-depth // group), out, dtype=torch.float16)
    return PackedCodes(
        code=code,
        inputs=Inputs.AS_THEY_ARE,
        shape=shape,
        codes=_empty(depth * code.bits // 8 // step, out, step, dtype=torch.uint8),
        scales=scales,
        offsets=torch.empty_like(scales) if has_offsets else None,
        group=group,
        is_centred=code is Code.UINT4 and not has_offsets,
        order=None,
    )


def _of_experts() -> list[Variant]:
    """The experts of Qwen3-30B-A3B."""
    found: list[Variant] = []
    for num_tokens in (7, 512, 4096):
        for code, group, inputs in (
            (Code.UINT4, 32, Inputs.AS_THEY_ARE),
            (Code.E2M1, 32, Inputs.AS_THEY_ARE),
            (Code.E4M3, 128, Inputs.E4M3_GROUPS),
            (Code.INT8, None, Inputs.INT8),
        ):
            kind = "" if inputs is Inputs.AS_THEY_ARE else " of int8" if inputs is Inputs.INT8 else " of float8"
            name = f"experts of codes, {num_tokens} tokens{kind}, {code.value}"
            all_of_it = of_launch(name, partial(_grouped_mlp, num_tokens, code, group, inputs))
            found += [one for one in all_of_it if one.name.endswith(("grouped_product_kernel", "activate_kernel"))]
    return found


def _of_rows() -> list[Variant]:
    x = _empty(7, 4096, dtype=torch.bfloat16)
    return of_launch("rows to int8, 4096", lambda: quantize_rows(x, torch.int8))


def _grouped_mlp(num_tokens: int, code: Code, group: int | None, inputs: Inputs) -> None:
    num_experts, hidden, width = 128, 2048, 768

    def stack(out: int, depth: int) -> PackedCodes:
        one = packed(code, (out, depth), group or depth, of_bytes=inputs is not Inputs.AS_THEY_ARE, has_offsets=False)
        codes, scales = (_empty(num_experts, *part.shape, dtype=part.dtype) for part in (one.codes, one.scales))
        return replace(one, inputs=inputs, codes=codes, scales=scales)

    chosen, weights = _empty(num_tokens, 8, dtype=torch.int32), _empty(num_tokens, 8, dtype=torch.float32)
    x = _empty(num_tokens, hidden, dtype=torch.bfloat16)
    grouped_coded_mlp(x, chosen, weights, CodedStacks(stack(2 * width, hidden), stack(hidden, width)))


def _multiply(
    num_rows: int, code: Code, group: int, dtype: torch.dtype = torch.bfloat16, *, has_offsets: bool = False
) -> None:
    of_bytes = dtype.itemsize == 1
    weight = packed(code, (_OUT, _DEPTH), group, of_bytes=of_bytes, has_offsets=has_offsets)
    groups = _DEPTH // group
    scales = _empty(num_rows, groups, dtype=torch.float32) if of_bytes else None
    y = _empty(num_rows, _OUT, dtype=torch.bfloat16)
    multiply_into(Rows(_empty(num_rows, _DEPTH, dtype=dtype), scales), weight, None, y)
