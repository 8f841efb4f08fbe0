"""Experts on a GPU: their choice, and the products of all of them in one launch."""

import pytest
import torch

from services.engine.kernels.expert_tally import ExpertTally
from services.engine.kernels.gpu.experts import ExpertStacks, grouped_mlp
from services.engine.kernels.gpu.routing import route
from services.engine.kernels.routing_numbers import RoutingNumbers
from tests.gpu.checks import experts as checks


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(8))
def test_experts_and_their_products_are_those_of_float64(device: torch.device, seed: int) -> None:
    found = checks.check(device, seed=seed, num_cases=3)

    assert [check for check in found if not check.ok] == []


def test_of_equal_scores_those_of_lower_numbers_are_chosen(device: torch.device) -> None:
    chosen, weights = route(torch.zeros(2, 6, device=device), RoutingNumbers(6, 3))

    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 6, device=device))


def test_a_token_s_result_does_not_depend_on_the_others(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    x, gate_up, down = (
        torch.randn(*shape, generator=generator).to(device) for shape in ((9, 32), (4, 32, 32), (4, 32, 16))
    )
    chosen = torch.tensor([[token % 4, (token + 1) % 4] for token in range(9)], device=device)
    weights = torch.ones(9, 2, device=device)
    together = grouped_mlp(x, chosen, weights, ExpertStacks(gate_up, down))

    alone = [
        grouped_mlp(x[at : at + 1], chosen[at : at + 1], weights[:1], ExpertStacks(gate_up, down)) for at in (0, 8)
    ]
    assert torch.equal(torch.cat(alone), together[[0, 8]])


def test_numbers_that_are_not_finite_stay_with_their_token(device: torch.device) -> None:
    logits = torch.zeros(2, 8, device=device)
    logits[1] = torch.nan
    chosen, weights = route(logits, RoutingNumbers(8, 2, normalized=True))
    x, gate_up, down = (torch.ones(*shape, device=device) for shape in ((2, 16), (8, 32, 16), (8, 16, 16)))

    y = grouped_mlp(x, chosen, weights, ExpertStacks(gate_up, down))

    assert y[0].isfinite().all()
    assert not y[1].isfinite().any()


def test_pairs_are_tallied_without_those_of_padding(device: torch.device) -> None:
    """Tokens beyond the number that is given are padding, in more than one program that counts."""
    generator = torch.Generator().manual_seed(5)
    num_tokens, num_experts = 150, 5
    x, gate_up, down = (torch.zeros(*shape, device=device) for shape in ((num_tokens, 16), (5, 32, 16), (5, 16, 16)))
    chosen = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(num_tokens)]).to(device)
    weights, stacks = torch.ones(num_tokens, 2, device=device), ExpertStacks(gate_up, down)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    num_counted = torch.zeros(1, dtype=torch.int32, device=device)

    for present in (150, 31, 149):
        num_counted.fill_(present)
        grouped_mlp(x, chosen, weights, stacks, tally=ExpertTally(counts, num_counted))

    expected = sum(chosen[:present].flatten().bincount(minlength=num_experts) for present in (150, 31, 149))
    assert counts.tolist() == expected.tolist()
    grouped_mlp(x, chosen, weights, stacks, tally=ExpertTally(counts))
    assert (counts - expected).tolist() == chosen.flatten().bincount(minlength=num_experts).tolist()
