"""Linear layers in FP8: the product of what was quantised, and a refusal in words where there is none."""

import pytest
import torch

from loadtest.gpu.checks import fp8_linear as checks
from services.engine.kernels.gpu import fp8_linear


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


def test_a_cpu_has_no_fp8_weights():
    assert fp8_linear.refusal(torch.device("cpu"), torch.bfloat16) == "FP8 weights need a CUDA GPU, not cpu"


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((8, 0), torch.bfloat16, "FP8 weights need a GPU of compute capability 8.9 or later; A100 has 8.0"),
        ((9, 0), torch.float16, "FP8 weights need bfloat16 activations, not float16"),
        ((8, 9), torch.bfloat16, None),
    ],
)
def test_fp8_weights_need_a_new_gpu_and_bfloat16(monkeypatch, capability, dtype, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")

    assert fp8_linear.refusal(torch.device("cuda"), dtype) == reason
