"""Products in int8 that tests make, and the same by integers and float64."""

from dataclasses import dataclass

import numpy as np
import torch

from services.engine.kernels.cpu.int8_linear import Int8Linear
from services.engine.quantization.codes import Code, CodedMatrix, Inputs

SHAPES = (  # rows, columns, depth: at and beside borders of panels, steps, register tiles and tiles of AMX
    (1, 32, 4),
    (1, 1, 1),
    (2, 33, 15),
    (3, 50, 37),
    (13, 64, 64),
    (14, 65, 16),
    (15, 31, 66),
    (17, 96, 127),
    (32, 128, 130),
    (33, 40, 260),
    (97, 192, 96),
    (257, 70, 52),
)
DEEP_SHAPES = ((5, 65, 8200), (270, 608, 4101))  # multiplied along parts of the depth


@dataclass(frozen=True, eq=False)
class Weight:
    """A weight in codes, and its bias."""

    codes: torch.Tensor  # int8 [columns, depth]
    scales: torch.Tensor  # float32 [columns]
    bias: torch.Tensor | None = None  # float32 [columns]

    def matrix(self, begin: int = 0, end: int | None = None) -> CodedMatrix:
        """Its rows, or some."""
        rows = slice(begin, end)
        return CodedMatrix(
            Code.INT8,
            self.codes[rows].view(torch.uint8),
            self.scales[rows, None],
            None,
            self.codes.shape[1],
            inputs=Inputs.INT8,
        )

    def linear(self, dtype: torch.dtype) -> Int8Linear:
        return Int8Linear([self.matrix()], self.bias, dtype)


def random_weight(columns: int, depth: int, *, has_bias: bool = True) -> Weight:
    """With all codes, -128 too."""
    generator = torch.Generator().manual_seed(columns * depth)
    codes = torch.randint(-128, 128, (columns, depth), dtype=torch.int8, generator=generator)
    scales = torch.rand(columns, generator=generator) * 0.02
    bias = torch.randn(columns, generator=generator) if has_bias else None
    return Weight(codes, scales, bias)


def random_rows(rows: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows + depth)).to(dtype)


def quantized(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes of finite rows, int64, and scales of rows, float64, computed by numpy in float32 as the kernel says it."""
    numbers = x.to(torch.float32).numpy()
    largest = np.abs(numbers).max(axis=1, keepdims=True)
    scales = largest / np.float32(127)
    factors = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.clip(np.rint(numbers * factors), -128, 127).astype(np.int64)
    return codes, scales.astype(np.float64)


def assert_product(found: torch.Tensor, x: torch.Tensor, weight: Weight) -> None:
    """To within the roundings after the exact sums: to float32, by two factors, and to the dtype of the result."""
    codes, scales = quantized(x)
    sums = codes.astype(np.float64) @ weight.codes.numpy().astype(np.float64).T  # exact, as they are below 2^53
    scaled = sums * scales * weight.scales.numpy().astype(np.float64)
    bias = 0 if weight.bias is None else weight.bias.numpy().astype(np.float64)
    expected = scaled + bias
    rounding = 2.0**-8 if found.dtype == torch.bfloat16 else 2.0**-24
    bound = rounding * np.abs(expected) + 4 * 2.0**-24 * (np.abs(scaled) + np.abs(expected)) + 1e-37
    assert found.shape == expected.shape
    assert (np.abs(found.double().numpy() - expected) <= bound).all()


def outputs() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What this process's kernels make of each shape in float32, and what they gate."""
    found, gated = list[np.ndarray](), list[np.ndarray]()
    for rows, columns, depth in (*SHAPES, *DEEP_SHAPES):
        linear, x = random_weight(columns, depth).linear(torch.float32), random_rows(rows, depth, torch.float32)
        found.append(linear(x).numpy().copy())
        if linear.can_gate:
            gated.append(linear(x, gated=True).numpy().copy())
    return found, gated
