"""Experts by kernels whose weights stay in codes: what they compute is what experts of the same numbers compute."""

from dataclasses import replace

import pytest
import torch

from services.engine.kernels.cpu.coded_experts import CodedExperts
from services.engine.models.experts_config import Experts
from services.engine.models.grouped_mlp import ExpertCodes, ExpertWeights, GroupedMlp, coded_experts
from services.engine.models.routing import route
from tests.engine.kernels.coded_matrices import KINDS, Kind, coded
from tests.engine.kernels.test_packed_experts import SOFTMAX, Case, random, rms, silu_mul
from tests.engine.kernels.test_packed_linear import BOTH

CASES = [
    Case(SOFTMAX, 64, 1),
    Case(replace(SOFTMAX, intermediate_size=40), 72, 40),
    Case(replace(SOFTMAX, num_experts=2, top_k=1), 48, 700),
    Case(replace(SOFTMAX, num_experts=3, top_k=2, intermediate_size=2080), 2112, 12),
]


def codes_of(kind: Kind, experts: Experts, hidden: int) -> list[ExpertCodes]:
    width = experts.intermediate_size
    return [
        (coded(kind, width, hidden, 32), coded(kind, width, hidden, 32), coded(kind, hidden, width, 32))
        for _ in range(experts.num_experts)
    ]


def shuffled(codes: list[ExpertCodes]) -> list[ExpertCodes]:
    """Every matrix has other codes."""
    for seed, matrix in enumerate(matrix for each in codes for matrix in each):
        order = torch.randperm(matrix.shape[0], generator=torch.Generator().manual_seed(seed))
        matrix.codes.copy_(matrix.codes[order])
    return codes


def in_numbers(codes: list[ExpertCodes], dtype: torch.dtype) -> list[ExpertWeights]:
    return [
        ExpertWeights(torch.cat((gate.numbers(dtype), up.numbers(dtype))), down.numbers(dtype), None, None)
        for gate, up, down in codes
    ]


@pytest.mark.few(1)
@BOTH
@pytest.mark.parametrize("kind", KINDS[::5], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.hidden}-{case.rows}")
def test_they_compute_what_torch_computes(case: Case, kind: Kind, dtype: torch.dtype) -> None:
    codes = shuffled(codes_of(kind, case.experts, case.hidden))
    kernel = coded_experts(case.experts, lambda expert: codes[expert], dtype)
    assert isinstance(kernel, CodedExperts)
    x, logits = random(case.rows, case.hidden, dtype=dtype), random(case.rows, case.experts.num_experts, dtype=dtype)
    chosen, factors = route(logits, case.experts)
    in_double = [
        ExpertWeights(gate_up.double(), down.double(), None, None)
        for gate_up, down, _, _ in in_numbers(codes, torch.float32)
    ]
    expected = GroupedMlp(case.experts, lambda expert: in_double[expert])(x.double(), chosen, factors, silu_mul)
    found = kernel(x, kernel.choose(logits, None), None, None)
    if dtype == torch.bfloat16:
        own = in_numbers(codes, dtype)
        plain = GroupedMlp(case.experts, lambda expert: own[expert])(x, chosen, factors, silu_mul)
        assert rms(found, expected) <= 1.05 * rms(plain, expected)
    else:
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)
    assert kernel.counts.tolist() == chosen.flatten().bincount(minlength=case.experts.num_experts).tolist()


@pytest.mark.long
def test_experts_that_are_stored_in_several_ways_have_no_kernel() -> None:
    codes = codes_of(KINDS[0], SOFTMAX, 64)
    others = codes_of(KINDS[1], SOFTMAX, 64)
    mixed = [*codes[:-1], others[-1]]
    assert coded_experts(SOFTMAX, lambda expert: mixed[expert], torch.float32) is None
    assert coded_experts(SOFTMAX, lambda expert: None, torch.float32) is None
    assert coded_experts(SOFTMAX, lambda expert: codes[expert], torch.float16) is None
