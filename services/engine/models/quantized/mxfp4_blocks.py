"""gpt-oss' experts in blocks of 32 numbers with one exponent, as numbers [experts, in, out] and as codes."""

import math

import torch
from torch import Tensor

from services.engine.models.quantized.matrices import ReadPart
from services.engine.quantization.codes import Code, CodedMatrix
from services.engine.quantization.float_layers import MX_BLOCK
from services.protocol.model_files.base import ModelError

_MANTISSA_BITS = 7  # of bfloat16
_SMALLEST = 1 << (_MANTISSA_BITS - 1)  # the bits of 2 ** -127, which has no exponent
_NAN = 255  # the exponent that means no number


def read_experts(part: ReadPart, dtype: torch.dtype, experts: range, inputs: range) -> Tensor:
    """Returns these experts' numbers of these inputs, [experts, inputs, out], one expert at a time."""
    first = _part(part, "_scales", range(0, 1))
    numbers = torch.empty((len(experts), len(inputs), first.shape[1]), dtype=dtype, device=first.device)
    for place, expert in enumerate(experts if inputs else ()):
        numbers[place] = coded_expert(part, expert, inputs).numbers(dtype).T
    return numbers


def coded_expert(part: ReadPart, expert: int, inputs: range) -> CodedMatrix:
    """Returns an expert's matrix [out, inputs] as codes. Where the inputs, which are some, cut a block, smaller groups
    have its exponent.
    """
    first, blocks = inputs.start // MX_BLOCK, slice(inputs.start // MX_BLOCK, -(-inputs.stop // MX_BLOCK))
    packed = _part(part, "_blocks", range(expert, expert + 1))[0][:, blocks]
    exponents = _part(part, "_scales", range(expert, expert + 1))[0][:, blocks]
    codes, scales = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1), _scales(exponents)
    group = math.gcd(MX_BLOCK, inputs.start, inputs.stop)
    if group < MX_BLOCK:
        begin, end = inputs.start - first * MX_BLOCK, inputs.stop - first * MX_BLOCK
        of_groups = scales.repeat_interleave(MX_BLOCK // group, dim=1)
        codes, scales = codes[:, begin:end], of_groups[:, begin // group : end // group]
    return CodedMatrix(Code.E2M1, codes, scales, None, group)


def _scales(exponents: Tensor) -> Tensor:
    """Returns 2 ** (exponent - 127), bfloat16, whose bits of the exponent have the same bias."""
    bits = exponents.to(torch.int16) << _MANTISSA_BITS
    return torch.where(bits == 0, _SMALLEST, bits).view(torch.bfloat16)


def check_exponents(name: str, part: ReadPart) -> None:
    """Raises ModelError for an exponent that means no number."""
    if bool((_part(part, "_scales", None) == _NAN).any()):
        raise ModelError(f"tensor {name}_scales has a scale that is not finite")


def _part(part: ReadPart, end: str, experts: range | None) -> Tensor:
    found = part(end, None if experts is None else slice(experts.start, experts.stop), None)
    assert found is not None
    return found
