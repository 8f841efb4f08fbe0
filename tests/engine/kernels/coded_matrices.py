"""Matrices of random codes of every kind, and the bound within which products of them lie."""

from dataclasses import dataclass

import torch

from services.engine.kernels.cpu.coded_panels import step_depth
from services.engine.kernels.cpu.matmul import MOST_DEPTH
from services.engine.quantization.codes import CoarseScales, Code, CodedMatrix
from tests.engine.kernels.test_packed_linear import exact

_LARGEST = {Code.UINT4: 8.0, Code.UINT5: 16.0, Code.INT6: 32.0, Code.INT8: 128.0, Code.E4M3: 448.0, Code.E2M1: 6.0}
_NAN = 0x7F
_SHIFTED = 8  # offsets that are so many scales below 0


@dataclass(frozen=True)
class Kind:
    """A way of storing. offsets: one of none, any, shifted. block: groups with one float16; 1: scales of one level."""

    code: Code
    scales: str
    offsets: str
    block: int = 1

    def __str__(self) -> str:
        blocks = "" if self.block == 1 else f"-by-{self.block}"
        return f"{self.code.value}-{self.scales}{blocks}-{self.offsets}"


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
] + [
    Kind(Code.UINT5, "uint8", "any", 8),  # GGUF's Q5_K
    Kind(Code.INT6, "int8", "none", 16),  # Q6_K
    Kind(Code.UINT4, "uint8", "any", 8),  # Q4_K
]


def coded(kind: Kind, columns: int, depth: int, group: int, *, ordered: bool = False) -> CodedMatrix:
    """A matrix [columns, depth] of numbers of about 1 / sqrt(depth).

    Groups are as short or long as kernels take them: a step of codes, and blocks of groups what is unpacked at a time.
    """
    if kind.block > 1:
        group = max(min(group, MOST_DEPTH // kind.block), step_depth(kind.code))
    chance = torch.Generator().manual_seed(columns + depth)
    groups = columns, -(-depth // group)
    codes = torch.randint(2**kind.code.bits, (columns, depth), generator=chance, dtype=torch.uint8)
    if kind.code is Code.E4M3:
        codes[(codes & _NAN) == _NAN] = 1  # the smallest subnormal
    factor = depth**-0.5 / _LARGEST[kind.code]
    order = torch.randperm(depth, generator=chance) if ordered else None
    if kind.block > 1:
        return _of_two_levels(kind, codes, group, factor, order, chance)
    scales = ((0.5 + torch.rand(groups, generator=chance)) * factor).to(getattr(torch, kind.scales))
    offsets = None
    if kind.offsets == "any":
        offsets = (torch.randn(groups, generator=chance) * depth**-0.5).to(scales.dtype)
    elif kind.offsets == "shifted":
        offsets = (scales.to(torch.float32) * -_SHIFTED).to(scales.dtype)
    return CodedMatrix(kind.code, codes, scales, offsets, group, order)


def _of_two_levels(
    kind: Kind, codes: torch.Tensor, group: int, factor: float, order: torch.Tensor | None, chance: torch.Generator
) -> CodedMatrix:
    columns, depth = codes.shape
    groups = columns, -(-depth // group)
    blocks = columns, -(-groups[1] // kind.block)
    low, high, dtype = (-128, 128, torch.int8) if kind.scales == "int8" else (0, 256, torch.uint8)

    def fine() -> torch.Tensor:
        return torch.randint(low, high, groups, generator=chance).to(dtype)

    coarse = ((0.5 + torch.rand(blocks, generator=chance)) * factor / 128).to(torch.float16)
    offsets = coarse_offsets = None
    if kind.offsets == "any":
        offsets = fine()
        coarse_offsets = (torch.randn(blocks, generator=chance) * depth**-0.5 / 128).to(torch.float16)
    of_blocks = CoarseScales(coarse, coarse_offsets, kind.block)
    return CodedMatrix(kind.code, codes, fine(), offsets, group, order, coarse=of_blocks)


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
