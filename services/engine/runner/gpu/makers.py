"""The makers of a model's products on a GPU, by what the configuration asks for and the GPU can do."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from services.config import Quantization
from services.engine.kernels.gpu.coded_linear import coded_product
from services.engine.kernels.gpu.fp8_linear import Fp8Product
from services.engine.kernels.gpu.packed_codes import can_pack
from services.engine.models.experts_config import Experts
from services.engine.models.grouped_mlp import ExpertCodes, ExpertsKernel
from services.engine.models.linear import Coded, Product
from services.engine.models.makers import Makers
from services.engine.quantization.codes import CodedMatrix, Inputs
from services.engine.runner.gpu.experts import coded_experts, stacked_experts

Capability = tuple[int, int]

_CODES = (8, 0)  # of the first GPUs that compute with pairs of bfloat16
_E4M3_INPUTS = (8, 9)  # of the first GPUs whose matrix units take e4m3


def makers_for(quantization: Quantization, capability: Capability) -> Makers:
    """Returns the makers for a GPU of this compute capability. What it cannot multiply as codes is left to others."""
    takes_codes = capability >= _CODES

    def product(matrices: Coded, bias: Tensor | None) -> Product | None:
        return coded_product(_with_inputs(matrices, capability), bias) if takes_codes else None

    def experts(
        numbers: Experts, read: Callable[[int], ExpertCodes | None], dtype: torch.dtype
    ) -> ExpertsKernel | None:
        def read_taken(expert: int) -> ExpertCodes | None:
            codes = read(expert)
            return None if codes is None else codes._replace(matrices=_with_inputs(codes.matrices, capability))

        return coded_experts(numbers, read_taken) if takes_codes else None

    return Makers(
        product=Fp8Product if quantization == Quantization.FP8 else None,
        coded=product,
        experts=stacked_experts,
        coded_experts=experts,
    )


def _with_inputs(matrices: tuple[CodedMatrix, ...], capability: Capability) -> tuple[CodedMatrix, ...]:
    """Returns the matrices with inputs that the GPU and its kernels round as a checkpoint says, else as they are."""

    def is_taken(matrix: CodedMatrix) -> bool:
        of_e4m3 = matrix.inputs in (Inputs.E4M3, Inputs.E4M3_GROUPS)
        return can_pack(matrix) and (not of_e4m3 or capability >= _E4M3_INPUTS)

    return tuple(one if is_taken(one) else replace(one, inputs=Inputs.AS_THEY_ARE) for one in matrices)
