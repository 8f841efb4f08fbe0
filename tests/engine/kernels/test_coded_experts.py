"""Experts by kernels whose weights stay in codes: what they compute is what experts of the same numbers compute."""

from dataclasses import replace

import pytest
import torch

from services.engine.kernels.cpu.coded_experts import CodedExperts
from services.engine.kernels.routing_numbers import Scores
from services.engine.models.experts_config import Experts
from services.engine.models.grouped_mlp import ExpertCodes, ExpertWeights, GroupedMlp, coded_experts
from services.engine.models.routing import route
from services.engine.quantization.codes import Code
from tests.engine.kernels.coded_matrices import KINDS, Kind, coded
from tests.engine.kernels.rank_experts import experts_of_ranks
from tests.engine.kernels.test_packed_experts import SOFTMAX, Case, random, rms, silu_mul
from tests.engine.kernels.test_packed_linear import BOTH

CASES = [
    Case(SOFTMAX, 64, 1),
    Case(replace(SOFTMAX, intermediate_size=40), 72, 40),
    Case(replace(SOFTMAX, num_experts=2, top_k=1), 48, 700),
    Case(replace(SOFTMAX, num_experts=3, top_k=2, intermediate_size=2080), 2112, 12),
]

GPT_OSS = replace(SOFTMAX, scores=Scores.SOFTMAX_OF_CHOSEN, normalized=False, swiglu_limit=0.7, biases=True)
OF_GPT_OSS = [
    Case(replace(GPT_OSS, intermediate_size=160), 96, 9),
    Case(replace(GPT_OSS, intermediate_size=40), 72, 1),
    Case(replace(GPT_OSS, num_experts=2, top_k=1, intermediate_size=96), 160, 700),
    Case(replace(GPT_OSS, num_experts=3, top_k=2, intermediate_size=2080), 2112, 40),
]


def codes_of(kind: Kind, experts: Experts, hidden: int) -> list[ExpertCodes]:
    width = experts.intermediate_size
    return [
        ExpertCodes(
            (coded(kind, width, hidden, 32), coded(kind, width, hidden, 32), coded(kind, hidden, width, 32)),
            *(random(size, dtype=torch.float32, seed=seed) if experts.biases else None for size in (2 * width, hidden)),
        )
        for seed in range(experts.num_experts)
    ]


def shuffled(codes: list[ExpertCodes]) -> list[ExpertCodes]:
    """Every matrix has other codes."""
    for seed, matrix in enumerate(matrix for each in codes for matrix in each.matrices):
        order = torch.randperm(matrix.shape[0], generator=torch.Generator().manual_seed(seed))
        matrix.codes.copy_(matrix.codes[order])
    return codes


def in_numbers(codes: list[ExpertCodes], dtype: torch.dtype) -> list[ExpertWeights]:
    found = []
    for each in codes:
        gate, up, down = (matrix.numbers(torch.float32).to(dtype) for matrix in each.matrices)
        biases = (None if bias is None else bias.to(dtype) for bias in each[1:])
        found.append(ExpertWeights(torch.cat((gate, up)), down, *biases))
    return found


def check(case: Case, kind: Kind, dtype: torch.dtype) -> None:
    """Raises AssertionError if the error in bfloat16 is above 1.05 of torch's, or in float32 beyond its rounding."""
    codes = shuffled(codes_of(kind, case.experts, case.hidden))
    kernel = coded_experts(case.experts, lambda expert: codes[expert], dtype)
    assert isinstance(kernel, CodedExperts)
    x, logits = random(case.rows, case.hidden, dtype=dtype), random(case.rows, case.experts.num_experts, dtype=dtype)
    chosen, factors = route(logits, case.experts)
    in_double = in_numbers(codes, torch.float64)
    expected = GroupedMlp(case.experts, lambda expert: in_double[expert])(x.double(), chosen, factors, silu_mul)
    found = kernel(x, kernel.choose(logits, None), None, None)
    if dtype == torch.bfloat16:
        own = in_numbers(codes, dtype)
        plain = GroupedMlp(case.experts, lambda expert: own[expert])(x, chosen, factors, silu_mul)
        assert rms(found, expected) <= 1.05 * rms(plain, expected)
    else:
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)
    assert kernel.counts.tolist() == chosen.flatten().bincount(minlength=case.experts.num_experts).tolist()


@pytest.mark.few(1)
@BOTH
@pytest.mark.parametrize("kind", KINDS[::5], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.hidden}-{case.rows}")
def test_they_compute_what_torch_computes(case: Case, kind: Kind, dtype: torch.dtype) -> None:
    check(case, kind, dtype)


@pytest.mark.few(2)
@pytest.mark.parametrize("case", OF_GPT_OSS, ids=lambda case: f"{case.hidden}-{case.rows}")
@BOTH
def test_with_biases_and_clamped_activations(case: Case, dtype: torch.dtype) -> None:
    """As gpt-oss has them. Of one row's experts most get no token."""
    check(case, Kind(Code.E2M1, "bfloat16", "none"), dtype)


@pytest.mark.few(1)
@BOTH
@pytest.mark.parametrize("kind", KINDS[::9], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.hidden}-{case.rows}")
def test_experts_of_ranks_make_together_what_all_of_them_make(case: Case, kind: Kind, dtype: torch.dtype) -> None:
    codes = shuffled(codes_of(kind, case.experts, case.hidden))
    x, logits = random(case.rows, case.hidden, dtype=dtype), random(case.rows, case.experts.num_experts, dtype=dtype)
    in_double, total = in_numbers(codes, torch.float64), torch.zeros(case.rows, case.hidden, dtype=torch.float64)
    for own in experts_of_ranks(case.experts, min(3, case.experts.num_experts)):
        kernel = coded_experts(own, codes.__getitem__, dtype)
        assert isinstance(kernel, CodedExperts)
        total += kernel(x, kernel.choose(logits, None), None, None)
    expected = GroupedMlp(case.experts, in_double.__getitem__)(x.double(), *route(logits, case.experts), silu_mul)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert rms(total, expected) < bound * float(expected.pow(2).mean().sqrt())


@pytest.mark.long
def test_experts_that_are_stored_in_several_ways_have_no_kernel() -> None:
    codes = codes_of(KINDS[0], SOFTMAX, 64)
    others = codes_of(KINDS[1], SOFTMAX, 64)
    mixed = [*codes[:-1], others[-1]]
    assert coded_experts(SOFTMAX, lambda expert: mixed[expert], torch.float32) is None
    assert coded_experts(SOFTMAX, lambda expert: None, torch.float32) is None
    assert coded_experts(SOFTMAX, lambda expert: codes[expert], torch.float16) is None
