"""The last part of a matrix product, row by row, before a row is written: bias, SiLU of a gate, rounding."""

from typing import Any

from services.engine.kernels.cpu.elements import Element
from services.engine.kernels.cpu.exponential import silu
from services.engine.kernels.cpu.intrinsics import njit
from services.engine.kernels.cpu.vectors import load_floats

_VECTOR_BYTES = 64


def make_finish(element: Element, *, gated: bool) -> Any:
    """Makes a function that kernels call for 32 columns of a row.

    Its arguments: address of the sums; address of the sums that are gated; address of the target; addresses of both
    biases, float32, or 0 for none.

    gated: SiLU(first sums) * second sums, rounded as `transformers` does (Shazeer 2020, arXiv 2002.05202).
    """
    round_, store_twice = element.round_vector, element.store_vectors

    @njit(error_model="numpy")
    def biased(sums: int, bias: int) -> Any:
        return load_floats(sums) + load_floats(bias) if bias != 0 else load_floats(sums)

    @njit(error_model="numpy")
    def finished(sums: int, gated_sums: int, bias: int, gated_bias: int) -> Any:
        if gated:
            return round_(silu(round_(biased(sums, bias)))) * round_(biased(gated_sums, gated_bias))
        return biased(sums, bias)

    @njit(error_model="numpy")
    def finish(sums: int, gated_sums: int, target: int, bias: int, gated_bias: int) -> None:
        left = finished(sums, gated_sums, bias, gated_bias)
        bias, gated_bias = _further(bias), _further(gated_bias)
        store_twice(target, left, finished(sums + _VECTOR_BYTES, gated_sums + _VECTOR_BYTES, bias, gated_bias))

    return finish


@njit
def _further(address: int) -> int:
    return address + _VECTOR_BYTES if address != 0 else 0
