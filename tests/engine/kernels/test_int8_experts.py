"""Experts in int8: what they compute is what codes of weights and of rows mean, by integers and float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from services.engine.kernels.cpu.int8_experts import Int8Experts
from services.engine.kernels.routing_numbers import Scores
from services.engine.models.experts_config import Experts
from services.engine.models.grouped_mlp import ExpertCodes, clamped_swiglu, coded_experts
from services.engine.models.routing import route
from services.engine.quantization.codes import CodedMatrix, Inputs
from services.engine.quantization.rounding import to_int8
from tests.engine.kernels.int8_products import quantized
from tests.engine.kernels.rank_experts import experts_of_ranks
from tests.engine.kernels.test_packed_experts import SOFTMAX, Case, random, rms
from tests.engine.kernels.test_packed_linear import BOTH

GPT_OSS = replace(SOFTMAX, scores=Scores.SOFTMAX_OF_CHOSEN, normalized=False, swiglu_limit=0.7, biases=True)
CASES = [
    Case(replace(GPT_OSS, intermediate_size=41), 70, 9),
    Case(SOFTMAX, 64, 1),
    Case(replace(SOFTMAX, num_experts=2, top_k=1, intermediate_size=33), 130, 700),
    Case(replace(GPT_OSS, num_experts=3, top_k=2, intermediate_size=600), 4200, 40),
]
_ERRORS = {torch.float32: 1e-3, torch.bfloat16: 1e-2}  # of the inputs' rounding, where last bits decide a code


def codes_of(experts: Experts, hidden: int) -> list[ExpertCodes]:
    width = experts.intermediate_size

    def matrix(out: int, depth: int, seed: int) -> CodedMatrix:
        return to_int8(random(out, depth, dtype=torch.float32, seed=seed) / depth**0.5)

    def bias(size: int, seed: int) -> Tensor | None:
        return random(size, dtype=torch.float32, seed=seed) if experts.biases else None

    return [
        ExpertCodes(
            (
                matrix(width, hidden, 3 * seed),
                matrix(width, hidden, 3 * seed + 1),
                matrix(hidden, width, 3 * seed + 2),
            ),
            bias(2 * width, seed),
            bias(hidden, seed),
        )
        for seed in range(experts.num_experts)
    ]


def product(x: Tensor, matrices: list[CodedMatrix], bias: Tensor | None, *, rounds: bool) -> Tensor:
    if rounds:
        codes, scales = quantized(x.to(torch.float32))
        x = torch.from_numpy(codes * scales)
    y = x.double() @ torch.cat([matrix.numbers(torch.float64) for matrix in matrices]).T
    return y if bias is None else y + bias.double()


def expected(
    case: Case, codes: list[ExpertCodes], x: Tensor, chosen: Tensor, factors: Tensor, *, rounds: bool
) -> Tensor:
    y, clamp = torch.zeros(len(x), case.hidden, dtype=torch.float64), case.experts.clamp
    for expert, (matrices, gate_up_bias, down_bias) in enumerate(codes):
        tokens, choices = (chosen == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        gate_up = product(x[tokens], list(matrices[:2]), gate_up_bias, rounds=rounds)
        if clamp is None:
            gate, up = gate_up.chunk(2, dim=-1)
            inner = functional.silu(gate) * up
        else:
            inner = clamped_swiglu(gate_up, *clamp)
        made = product(inner.to(x.dtype), list(matrices[2:]), down_bias, rounds=rounds)
        y.index_add_(0, tokens, made * factors[tokens, choices, None])
    return y


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.hidden}-{case.rows}")
@BOTH
def test_they_compute_what_codes_mean(case: Case, dtype: torch.dtype) -> None:
    """Far nearer to it than to what rows as they are would give. Of one row's experts most get no token."""
    codes = codes_of(case.experts, case.hidden)
    kernel = coded_experts(case.experts, lambda expert: codes[expert], dtype)
    assert isinstance(kernel, Int8Experts)
    x, logits = random(case.rows, case.hidden, dtype=dtype), random(case.rows, case.experts.num_experts, dtype=dtype)
    chosen, factors = route(logits, case.experts)
    found = kernel(x, kernel.choose(logits, None), None, None)
    exact, plain = (expected(case, codes, x, chosen, factors, rounds=rounds) for rounds in (True, False))
    size = float(exact.pow(2).mean().sqrt())
    assert rms(found, exact) < _ERRORS[dtype] * size
    assert dtype == torch.bfloat16 or rms(plain, exact) > 4 * rms(found, exact)
    assert kernel.counts.tolist() == chosen.flatten().bincount(minlength=case.experts.num_experts).tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.hidden}-{case.rows}")
@BOTH
def test_experts_of_ranks_make_together_what_codes_mean(case: Case, dtype: torch.dtype) -> None:
    codes, total = codes_of(case.experts, case.hidden), torch.zeros(case.rows, case.hidden, dtype=torch.float64)
    x, logits = random(case.rows, case.hidden, dtype=dtype), random(case.rows, case.experts.num_experts, dtype=dtype)
    for own in experts_of_ranks(case.experts, min(3, case.experts.num_experts)):
        kernel = coded_experts(own, codes.__getitem__, dtype)
        assert isinstance(kernel, Int8Experts)
        total += kernel(x, kernel.choose(logits, None), None, None)
    exact = expected(case, codes, x, *route(logits, case.experts), rounds=True)
    assert rms(total, exact) < _ERRORS[dtype] * float(exact.pow(2).mean().sqrt())


@pytest.mark.few(1)
@BOTH
def test_a_row_is_the_same_to_the_bit_whatever_is_beside_it(dtype: torch.dtype) -> None:
    experts = replace(GPT_OSS, num_experts=4, top_k=2)
    codes = codes_of(experts, 64)
    kernel = coded_experts(experts, lambda expert: codes[expert], dtype)
    assert isinstance(kernel, Int8Experts)
    x, logits = random(700, 64, dtype=dtype), random(700, 4, dtype=dtype)
    of_all = kernel(x, kernel.choose(logits, None), None, None).clone()
    for rows in (slice(0, 1), slice(699, 700), slice(100, 117), slice(300, 600)):
        assert torch.equal(kernel(x[rows], kernel.choose(logits[rows], None), None, None), of_all[rows])


def test_what_differs_between_experts_has_no_kernel() -> None:
    codes = codes_of(SOFTMAX, 64)
    gate, up, down = codes[3].matrices
    plain = Inputs.AS_THEY_ARE
    for matrices in ((replace(gate, inputs=plain), up, down), (gate, up, replace(down, inputs=plain))):
        mixed = [*codes[:3], ExpertCodes(matrices), *codes[4:]]
        assert coded_experts(SOFTMAX, mixed.__getitem__, torch.float32) is None
