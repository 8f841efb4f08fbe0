"""Products in FP8, against products in float64 of the quantised operands and of the originals."""

import torch
from torch import Tensor

from services.engine.kernels.gpu.fp8_linear import Fp8Product, quantize_channels
from services.engine.kernels.gpu.rows import quantize_rows
from tests.gpu.checks.buffers import within
from tests.gpu.checks.errors import compare
from tests.gpu.checks.result import Check
from tests.gpu.checks.source import Source, cases

_DTYPE = torch.bfloat16
_FROM_UNQUANTISED = 0.08  # each operand is off by 3 bits of mantissa's rounding: 0.026 of a normal distribution


def check(device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """Checks `num_cases` random cases."""
    return cases(_product, device, seed, num_cases)


def _product(source: Source, name: str) -> list[Check]:
    most = 8 if source.device.type == "cpu" else 256  # times 16
    num_rows, num_in, num_out = source.num_rows(), *(16 * source.choices.randint(4, most) for _ in range(2))
    sizes = torch.logspace(-1, 1, num_out, device=source.device)[:, None]
    weight = (source.normal(num_out, num_in, dtype=torch.float32) * sizes).to(_DTYPE)
    bias = source.normal(num_out, dtype=_DTYPE) if source.choices.random() < 0.5 else None
    x = within(source.normal(num_rows, num_in, dtype=_DTYPE), num_in + source.choices.choice((0, 16)))
    y = Fp8Product(weight, bias)(x)
    (rows, row_scales), (channels, channel_scales) = quantize_rows(x), quantize_channels(weight)
    offset = 0 if bias is None else bias.double()
    same = (rows.double() * row_scales.double()) @ (channels.double() * channel_scales.t().double()).t() + offset
    wide = x.double() @ weight.double().t() + offset
    name = f"fp8 product {num_rows} x {num_in} x {num_out} {'without' if bias is None else 'with'} bias {name}"
    return [
        compare(name, y, same, _DTYPE),
        Check(f"{name}, of what was not quantised", _error(y, wide, sizes), _FROM_UNQUANTISED),
    ]


def _error(y: Tensor, wide: Tensor, sizes: Tensor) -> float:
    """Computes the error of all rows together, each channel divided by its size: few large ones do not decide."""
    by_size = sizes.double().t()
    return float(((y.double() - wide) / by_size).norm() / (wide / by_size).norm())
