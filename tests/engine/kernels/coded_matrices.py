"""Matrices of random codes of every kind, and the bound within which products of them lie."""

from dataclasses import dataclass

import torch

from services.engine.quantization.codes import Code, CodedMatrix
from tests.engine.kernels.test_packed_linear import exact

_LARGEST = {Code.UINT4: 8.0, Code.INT8: 128.0, Code.E4M3: 448.0, Code.E2M1: 6.0}
_NAN = 0x7F
_SHIFTED = 8  # offsets that are so many scales below 0


@dataclass(frozen=True)
class Kind:
    """A way of storing. offsets: one of none, any, shifted."""

    code: Code
    scales: str
    offsets: str

    def __str__(self) -> str:
        return f"{self.code.value}-{self.scales}-{self.offsets}"


KINDS = [
    Kind(code, scales, offsets)
    for code, offsets in (
        (Code.UINT4, "any"),
        (Code.UINT4, "shifted"),
        (Code.INT8, "none"),
        (Code.E4M3, "none"),
        (Code.E2M1, "none"),
        (Code.INT8, "any"),
    )
    for scales in ("float16", "float32", "bfloat16")
]


def coded(kind: Kind, columns: int, depth: int, group: int, *, ordered: bool = False) -> CodedMatrix:
    """A matrix [columns, depth] of numbers of about 1 / sqrt(depth)."""
    chance = torch.Generator().manual_seed(columns + depth)
    groups = columns, -(-depth // group)
    codes = torch.randint(2**kind.code.bits, (columns, depth), generator=chance, dtype=torch.uint8)
    if kind.code is Code.E4M3:
        codes[(codes & _NAN) == _NAN] = 1  # the smallest subnormal
    factor = depth**-0.5 / _LARGEST[kind.code]
    scales = ((0.5 + torch.rand(groups, generator=chance)) * factor).to(getattr(torch, kind.scales))
    offsets = None
    if kind.offsets == "any":
        offsets = (torch.randn(groups, generator=chance) * depth**-0.5).to(scales.dtype)
    elif kind.offsets == "shifted":
        offsets = (scales.to(torch.float32) * -_SHIFTED).to(scales.dtype)
    order = torch.randperm(depth, generator=chance) if ordered else None
    return CodedMatrix(kind.code, codes, scales, offsets, group, order)


def assert_close(
    found: torch.Tensor, x: torch.Tensor, weight: CodedMatrix | torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Half a unit in the last place of the result's dtype; what adding up in float32 may lose, as many roundings as
    there are products, each of at most 2**-24 of what has been added up by then; and in bfloat16 what numbers lose that
    are rounded before.

    What is added up are codes and offsets apart, which may be larger than the numbers.
    """
    numbers = (weight if isinstance(weight, torch.Tensor) else weight.numbers(torch.float32)).double()
    expected = exact(x, numbers, bias)
    largest = numbers.abs() + 4 * numbers.shape[1] ** -0.5
    size = x.double().abs() @ largest.T + (0 if bias is None else bias.double().abs())
    rounded = (x.double().square() @ numbers.square().T).sqrt()  # of the products, which are rounded by chance
    is_short = found.dtype == torch.bfloat16
    bound = (2.0**-8 if is_short else 2.0**-24) * expected.abs() + 2.0**-24 * x.shape[1] ** 0.5 * 4 * size
    if is_short:
        bound += 2.0**-9 * 5 * rounded
    assert found.shape == expected.shape
    assert ((found.double() - expected).abs() <= bound).all()
