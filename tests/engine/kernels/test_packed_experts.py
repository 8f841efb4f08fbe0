"""Experts by kernels: what they choose and compute is what torch does, and no row depends on those beside it."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from services.engine.kernels.cpu.matmul import padded
from services.engine.kernels.cpu.packed_experts import PackedExperts
from services.engine.kernels.cpu.recording import empty_rows
from services.engine.kernels.routing_numbers import Scores
from services.engine.models.experts_config import Experts
from services.engine.models.grouped_mlp import ExpertWeights, GroupedMlp, packed_experts
from services.engine.models.routing import route
from tests.engine.kernels.rank_experts import experts_of_ranks

BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
SOFTMAX = Experts(num_experts=8, top_k=3, intermediate_size=48, layers=(0,), normalized=True)
V3 = Experts(
    num_experts=24, top_k=4, intermediate_size=10, layers=(0,), scores=Scores.SIGMOID, normalized=True, scaling=2.5,
    num_groups=6, groups_kept=2, sums_best_two=True, corrected=True,
)  # fmt: skip
ROUTINGS = {
    "softmax": SOFTMAX,
    "not-normalized": replace(SOFTMAX, normalized=False, scaling=3.0, num_experts=33),
    "in-groups": replace(SOFTMAX, num_groups=4, groups_kept=2),
    "all-of-them": replace(SOFTMAX, top_k=8),
    "v3": V3,
    "gpt-oss": replace(SOFTMAX, scores=Scores.SOFTMAX_OF_CHOSEN, normalized=False, num_experts=65, top_k=17),
}


class Case(NamedTuple):
    """Experts of some numbers, and how many rows they are tried with."""

    experts: Experts
    hidden: int
    rows: int


CASES = [
    Case(SOFTMAX, 64, 1),
    Case(replace(SOFTMAX, intermediate_size=33), 70, 40),
    Case(replace(SOFTMAX, swiglu_limit=0.5, biases=True), 96, 9),
    Case(replace(SOFTMAX, num_experts=2, top_k=1, intermediate_size=40), 48, 700),
    Case(replace(SOFTMAX, num_experts=3, top_k=2, intermediate_size=2080), 2112, 12),
]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def weights_of(experts: Experts, hidden: int, dtype: torch.dtype) -> list[ExpertWeights]:
    width, found = experts.intermediate_size, []
    for seed in range(experts.num_experts):
        gate_up = (random(2 * width, hidden, dtype=torch.float32, seed=seed) / hidden**0.5).to(dtype)
        down = (random(hidden, width, dtype=torch.float32, seed=seed) / width**0.5).to(dtype)
        biases = [random(size, dtype=dtype, seed=seed) if experts.biases else None for size in (2 * width, hidden)]
        found.append(ExpertWeights(gate_up, down, *biases))
    return found


def packed(experts: Experts, weights: list[ExpertWeights]) -> PackedExperts:
    kernel = GroupedMlp(experts, lambda expert: weights[expert], make_kernel=packed_experts).kernel
    assert isinstance(kernel, PackedExperts)
    return kernel


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rms(values: Tensor, exact: Tensor) -> float:
    return float((values.double() - exact).pow(2).mean().sqrt())


def check(case: Case, dtype: torch.dtype) -> None:
    """Raises AssertionError if the error in bfloat16 is above 1.05 of torch's, or in float32 beyond its rounding."""
    weights = weights_of(case.experts, case.hidden, dtype)
    kernel, plain = packed(case.experts, weights), GroupedMlp(case.experts, lambda expert: weights[expert])
    in_double = [ExpertWeights(*(None if one is None else one.double() for one in each)) for each in weights]
    exact = GroupedMlp(case.experts, lambda expert: in_double[expert])
    x = random(case.rows, case.hidden, dtype=dtype)
    logits = random(case.rows, case.experts.num_experts, dtype=dtype)
    chosen, factors = route(logits, case.experts)
    found = kernel(x, kernel.choose(logits, None), None, None)
    expected = exact(x.double(), chosen, factors, silu_mul)
    if dtype == torch.bfloat16:
        assert rms(found, expected) <= 1.05 * rms(plain(x, chosen, factors, silu_mul), expected)
    else:
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)
    assert kernel.counts.tolist() == chosen.flatten().bincount(minlength=case.experts.num_experts).tolist()


@BOTH
@pytest.mark.parametrize("name", ROUTINGS)
def test_they_choose_what_torch_chooses(name: str, dtype: torch.dtype) -> None:
    """Of equal logits too, of which bfloat16 has many."""
    experts = ROUTINGS[name]
    kernel = packed(experts, weights_of(experts, 16, dtype))
    logits = random(200, experts.num_experts + 1, dtype=dtype)[:, :-1]
    correction = random(experts.num_experts, dtype=torch.float32) if experts.corrected else None
    choice = kernel.choose(logits, correction)
    chosen, weights = route(logits, experts, correction)
    count = chosen.numel()
    assert torch.equal(choice.chosen[:count].view_as(chosen).long(), chosen)
    torch.testing.assert_close(choice.weights[:count].view_as(weights), weights, atol=1e-6, rtol=2e-6)


@BOTH
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.hidden}-{case.rows}")
def test_they_compute_what_torch_computes(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.few(7)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.hidden}-{case.rows}")
@BOTH
@pytest.mark.parametrize("fused", [True, False])
def test_experts_of_ranks_make_together_what_all_of_them_make(fused: bool, dtype: torch.dtype, case: Case) -> None:
    """Of single rows, some ranks have no expert. Each rank counts the pairs of all of them."""
    weights, most = weights_of(case.experts, case.hidden, dtype), min(3, case.experts.num_experts)
    whole = packed(case.experts, weights)
    x, logits = random(case.rows, case.hidden, dtype=dtype), random(case.rows, case.experts.num_experts, dtype=dtype)
    chosen, factors = route(logits, case.experts)
    expected = whole(x, whole.choose(logits, None), None, None).float()
    total, idle = torch.zeros_like(expected), 0
    for own in experts_of_ranks(case.experts, most):
        is_own = (chosen >= own.own.start) & (chosen < own.own.stop)
        if fused:
            kernel = packed(own, weights)
            made = kernel(x, kernel.choose(logits, None), None, None)
            assert torch.equal(kernel.counts, whole.counts)
        else:
            made = GroupedMlp(own, weights.__getitem__)(x, chosen, factors, silu_mul)
        assert not made[~is_own.any(dim=1)].any(), "rows without an expert of the rank"
        assert made[is_own.any(dim=1)].any(dim=1).all()
        total, idle = total + made.float(), idle + int((~is_own.any(dim=1)).sum())
    assert idle > 0 or case.experts.top_k > 1
    tolerance = {"atol": 0.05, "rtol": 0.05} if dtype == torch.bfloat16 else {"atol": 2e-5, "rtol": 1e-4}
    torch.testing.assert_close(total, expected, **tolerance)


@BOTH
def test_a_row_is_the_same_to_the_bit_whatever_is_beside_it(dtype: torch.dtype) -> None:
    experts = replace(SOFTMAX, num_experts=4, top_k=2)
    kernel = packed(experts, weights_of(experts, 64, dtype))
    x, logits = random(900, 64, dtype=dtype), random(900, 4, dtype=dtype)

    def run(rows: slice) -> Tensor:
        return kernel(x[rows], kernel.choose(logits[rows], None), None, None)

    of_all = run(slice(None))
    for rows in (slice(0, 1), slice(899, 900), slice(100, 117), slice(300, 600)):
        assert torch.equal(run(rows), of_all[rows])


@BOTH
@pytest.mark.parametrize("with_gate", [False, True])
def test_a_shared_expert_is_added(with_gate: bool, dtype: torch.dtype) -> None:
    kernel = packed(SOFTMAX, weights_of(SOFTMAX, 70, dtype))
    x, logits = random(7, 70, dtype=dtype), random(7, 9, dtype=dtype)
    shared = empty_rows(7, padded(70), dtype).normal_()[:, :70]
    choice = kernel.choose(logits[:, :8], None)
    alone = kernel(x, choice, None, None).clone()
    found = kernel(x, choice, shared, logits[:, 8:] if with_gate else None)
    factor = logits[:, 8:].double().sigmoid() if with_gate else 1.0
    tolerance = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(found.double(), alone.double() + factor * shared.double(), **tolerance)


def test_numbers_that_are_not_finite_reach_the_result() -> None:
    """No choice leads out of memory, and the row is seen as damaged."""
    kernel = packed(V3, weights_of(V3, 16, torch.float32))
    logits = random(4, 24, dtype=torch.float32)
    logits[1], logits[2, 3] = torch.nan, torch.inf
    choice = kernel.choose(logits, torch.zeros(24))
    experts = choice.chosen[:16].view(4, 4)
    assert ((experts >= 0) & (experts < 24)).all()
    assert all(len(set(row)) == 4 for row in experts.tolist())
    assert not kernel(random(4, 16, dtype=torch.float32), choice, None, None)[1].isfinite().any()


def test_wide_logits_are_the_rows_themselves() -> None:
    kernel, x = packed(SOFTMAX, weights_of(SOFTMAX, 70, torch.bfloat16)), random(5, 70, dtype=torch.bfloat16)
    assert torch.equal(kernel.widened(x), x.float())
