"""Linear layers in FP8: the product of what was quantised."""

import pytest
import torch

from services.engine.kernels.gpu import fp8_linear
from tests.gpu.checks import fp8_linear as checks


def test_product_is_that_of_the_quantised_operands(device):
    found = checks.check(device, seed=1, num_cases=4)

    assert [check for check in found if not check.ok] == []


def test_channels_are_quantised_each_by_its_largest(device):
    weight = torch.tensor([[1.0, -448.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0], [2.0, 1.0, -4.0, 0.5]], device=device)

    quantized, scales = fp8_linear.quantize_channels(weight)

    assert quantized.dtype == torch.float8_e4m3fn
    assert scales.shape == (1, 3)
    torch.testing.assert_close(scales[0, 0::2], torch.tensor([1.0, 4 / 448], device=device))
    torch.testing.assert_close(quantized.float() * scales.t(), weight)


def test_sizes_that_the_product_does_not_take_are_refused(device):
    with pytest.raises(ValueError, match="multiples of 16, not 24 x 32"):
        fp8_linear.Fp8Product(torch.zeros(24, 32, dtype=torch.bfloat16, device=device), None)
