"""Distances between a kernel's result and its reference."""

import torch
from torch import Tensor

from tests.gpu.checks.result import Check

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
NEAREST = 0.501  # for `float8_steps`


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Computes the worst row's ‖out - reference‖ / ‖reference‖. Rows lie in the last dimension."""
    wide, reference = out.to("cpu", torch.float64), reference.to("cpu", torch.float64)
    error = (wide - reference).norm(dim=-1) / reference.norm(dim=-1).clamp(min=1e-30)
    return float(error.max())


def compare(name: str, out: Tensor, reference: Tensor, dtype: torch.dtype) -> Check:
    """Compares by `relative_error`. dtype: that of the operands."""
    return Check(name, relative_error(out, reference), BOUNDS[dtype])


def exactly(name: str, ok: bool) -> Check:
    """Makes a check of a condition, with error 0 or 1 and bound 0."""
    return Check(name, 0.0 if ok else 1.0, 0.0)


def float8_steps(name: str, out: Tensor, reference: Tensor, bound: float) -> Check:
    """Counts steps of float8_e4m3fn between `out` and the reference; the nearest number is at most half a step away."""
    reference = reference.to("cpu", torch.float64).clamp(-448, 448)
    exponent = torch.floor(torch.log2(reference.abs().clamp(min=2.0**-6)))
    steps = (out.to("cpu", torch.float64) - reference).abs() / torch.exp2(exponent - 3)
    return Check(name, steps.max().item(), bound)
