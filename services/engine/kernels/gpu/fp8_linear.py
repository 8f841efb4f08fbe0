"""y = x Wᵀ + b in FP8. Weights are quantised once, with a scale for each output channel; activations at each call, with
one for each row.

Torch computes the product by cuBLAS or CUTLASS. On CUDA it needs compute capability 8.9 or later.
"""

import torch
from torch import Tensor

from services.engine.kernels.gpu.launch import UnsupportedShape
from services.engine.kernels.gpu.rows import quantize_rows

_MULTIPLE = 16  # in and out features are multiples of it


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weight [out, in] as float8_e4m3fn [out, in], and float32 [1, out], the factor of each row."""
    quantized, scales = quantize_rows(weight)
    return quantized, scales.t()


class Fp8Product:
    """A linear layer of bfloat16 activations. It takes over `weight` [out, in] and `bias` [out] from the caller."""

    __slots__ = ("_bias", "_scales", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        if any(size % _MULTIPLE for size in weight.shape):
            shape = " x ".join(map(str, weight.shape))
            raise UnsupportedShape(f"an FP8 product needs sizes that are multiples of {_MULTIPLE}, not {shape}")
        quantized, self._scales = quantize_channels(weight)
        self._weight = quantized.t()  # the product takes it column by column
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Maps [rows, in] to [rows, out]."""
        quantized, scales = quantize_rows(x)
        y: Tensor = torch._scaled_mm(
            quantized,
            self._weight,
            scale_a=scales,
            scale_b=self._scales,
            bias=self._bias,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return y
