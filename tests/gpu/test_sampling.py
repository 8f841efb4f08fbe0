"""Sampling in Triton: each token against an oracle, the oracle against the CPU's sampler and against probabilities."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from services.engine.kernels.gpu.sampling import draw, edit_logits, greedy, logprobs
from services.engine.kernels.torch_operations import TorchOperations
from services.engine.runner.base import NamedLogprobs
from services.engine.runner.cpu import sampler
from services.engine.runner.gpu.sampler import (
    DeviceMasks,
    DeviceNamed,
    mark_not_finite,
    mask_logits,
    name_alternatives,
    score,
)
from tests.gpu.checks import sampling as checks
from tests.gpu.checks import sampling_cases as cases
from tests.gpu.checks.sampling_oracle import Settings, at_the_edge, kept, lateness, race_numbers

SETTINGS = [
    Settings(),
    Settings(temperature=0.0),
    Settings(top_k=3),
    Settings(top_p=0.9),
    Settings(min_p=0.1),
    Settings(temperature=0.6, top_k=20, top_p=0.95),
    Settings(top_k=40, top_p=0.7, min_p=0.2),
    Settings(top_p=0.97, min_p=0.02),
    Settings(top_p=1e-30),
]


@pytest.mark.long
def test_the_checks_that_also_run_on_a_card(device: torch.device) -> None:
    assert [found for found in checks.check(device, seed=3, num_cases=6) if not found.ok] == []


@pytest.mark.parametrize("settings", SETTINGS[2:], ids=str)
def test_the_oracle_keeps_what_the_cpus_sampler_keeps(settings: Settings) -> None:
    """Uniform numbers next to each other draw every token that has a weight."""
    logits = np.random.default_rng(0).normal(0, 1, 50)
    weights = torch.from_numpy(np.exp((logits - logits.max()) / settings.temperature)).float()
    weights[weights < settings.min_p] = 0
    uniform = torch.linspace(0, 1 - 2**-20, 4000)
    top_k = torch.full((4000,), settings.top_k if settings.top_k > 0 else 50)
    filters = sampler._Filters(top_k, torch.full((4000,), settings.top_p), torch.full((4000,), int(logits.argmax())))
    drawn = sampler._draw_filtered(weights.expand(4000, -1), filters, uniform)
    assert sorted(set(drawn.tolist())) == np.flatnonzero(kept(logits, settings)).tolist()


def test_rows_with_a_number_that_is_not_finite_are_marked_and_no_others(device: torch.device) -> None:
    """Not those either whose numbers lie further apart than the largest."""
    inf, large = float("inf"), 3e38
    raw = torch.tensor(
        [[0.0, large, -large], [1.0, 2.0, 3.0], [0.0, torch.nan, 1.0], [0.0, inf, 1.0], [0.0, -inf, 1.0]], device=device
    )
    edited = torch.zeros_like(raw)
    mark_not_finite(raw, edited)
    assert edited[:, 0].isnan().tolist() == [False, False, True, True, True]


def test_equals_of_the_last_kept_token_are_kept() -> None:
    logits = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert kept(logits, Settings(top_k=2)).tolist() == [False, True, True, True, True, False]
    assert kept(logits, Settings(top_p=0.6)).tolist() == [False, True, True, True, True, False]
    assert kept(np.array([1.0, 3.0, 3.0]), Settings(top_k=2, min_p=1.0)).tolist() == [False, True, True]


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("alone", [{"top_k": 1}, {"top_p": 1e-9}, {"top_k": 1, "top_p": 0.5}], ids=str)
def test_a_filter_that_leaves_one_token_leaves_that_of_a_greedy_row(
    device: torch.device, alone: dict[str, Any], dtype: torch.dtype
) -> None:
    """Of equal logits: few of them, and as many as make no list of the best."""
    rng = np.random.default_rng(6)
    logits = cases.random_logits(rng, "ties", 12, 5000).to(dtype)
    logits[8:] = torch.randint(0, 2, (4, 5000), generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[8:, :7] = 0
    rows = [
        Settings(temperature=(0.6, 2.0)[row % 2], min_p=(0, 0.3)[row % 3 // 2], seed=row, **alone) for row in range(12)
    ]
    assert checks.drawn(logits, rows, device) == logits.float().numpy().argmax(axis=1).tolist()


def test_the_oracle_rejects_a_filter_that_is_off_by_one() -> None:
    """Who comes first of those that are not kept would win; only the last kept one is right."""
    logits = at_the_edge(np.linspace(3, 2.9, 500), Settings(top_k=40))
    ranks = np.argsort(np.argsort(-logits))
    errors = [lateness(logits, Settings(top_k=40), token) for token in np.argsort(ranks)]
    assert [rank for rank, error in enumerate(errors) if error < 1e-4] == [39]
    assert errors[40] == math.inf
    assert lateness(logits, Settings(top_k=41), int(np.argsort(ranks)[40])) == 0
    assert math.isnan(lateness(logits, Settings(), -1))


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_the_race_is_won_in_proportion_to_weights(along: str) -> None:
    """Chi-square at the 99.9 % point for 7 degrees of freedom; the last token's share is 1 in 10,000."""
    weights = np.array([0.35, 0.25, 0.15, 0.1, 0.08, 0.04, 0.0299, 0.0001])
    count = np.arange(200_000)
    seeds, positions = (count, 0 * count) if along == "seeds" else (0 * count, count)
    times = race_numbers(seeds.astype(np.uint64), positions, 8) / weights
    wanted = weights * len(count)
    assert ((np.bincount(times.argmin(axis=1), minlength=8) - wanted) ** 2 / wanted).sum() < 24.3


def test_every_filter_is_exact_at_its_edge(device: torch.device) -> None:
    rng = np.random.default_rng(5)
    found = [checks.check_edge(rng, vocab, device) for vocab in (1, 2, 33, 500, 2048, 2500, 5000) for _ in range(8)]
    assert [check for check in found if not check.ok] == []


@pytest.mark.few(1)
@pytest.mark.parametrize("top_p", [0.02, 0.3, 0.9])
def test_a_flat_row_races_again_until_top_p_keeps_the_winner(device: torch.device, top_p: float) -> None:
    """Too many tokens for a list of the best, and the smaller top_p, the more races."""
    logits = cases.random_logits(np.random.default_rng(1), "flat", 6, 8192)
    rows = [Settings(top_p=top_p, seed=seed) for seed in range(6)]
    assert checks.check_draw("", logits, rows, device).ok


def test_tiles_count_by_how_high_they_are(device: torch.device) -> None:
    """Logits rise from tile to tile."""
    logits = cases.random_logits(np.random.default_rng(4), "rising", 12, 9000)
    rows = [Settings(temperature=1.5, top_p=(1.0, 0.2, 0.8)[seed % 3], seed=seed) for seed in range(12)]
    assert checks.check_draw("", logits, rows, device).ok


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    """All settings in one batch: each row draws what it draws alone, with other padding between rows."""
    logits = cases.random_logits(np.random.default_rng(2), "usual", len(SETTINGS), 4500)
    together = checks.drawn(logits, SETTINGS, device)
    for row, settings in enumerate(SETTINGS):
        out = torch.full((1,), -1, dtype=torch.int32, device=device)
        draw(logits[row : row + 1].to(device), cases.on_device([settings], device), out, edited=True)
        assert out.tolist() == [together[row]]


@pytest.mark.parametrize("value", [-math.inf, 0.0])
def test_a_row_without_preference_still_gets_a_token(device: torch.device, value: float) -> None:
    """All are equal: each is as likely as any other, and nobody is who lies behind the vocabulary."""
    assert checks.check_draw("", torch.full((len(SETTINGS), 100), value), SETTINGS, device).ok


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_greedy_finds_the_first_of_the_highest(device: torch.device, dtype: torch.dtype) -> None:
    """In the second tile, and with 0 and -0 where all others are banned."""
    logits = torch.full((3, 4200), -3.0)
    logits[0, [4150, 4190]] = 2.0
    logits[1] = -math.inf
    logits[1, 5], logits[1, 9] = -0.0, 0.0
    out = torch.full((3,), -1, dtype=torch.int32, device=device)
    greedy(logits.to(dtype).to(device), out, edited=True)
    assert out.tolist() == [4150, 5, 0]


@pytest.mark.parametrize(("vocab", "dtype"), list(zip([1, 64, 4097], cases.DTYPES, strict=True)))
def test_a_row_with_a_number_that_is_not_finite_gets_no_token(
    device: torch.device, vocab: int, dtype: torch.dtype
) -> None:
    """Wherever the number is, and whatever is sampled; not so what lies behind the vocabulary, or what is banned."""
    rng = np.random.default_rng(vocab)
    assert checks.check_not_finite(rng, vocab, dtype, device).ok


def test_edits_are_those_of_the_cpus_sampler(device: torch.device) -> None:
    rng = np.random.default_rng(7)
    logits = torch.from_numpy(rng.normal(0, 5, (3, 300)).astype(np.float32))
    edits, found = cases.random_edits(rng, 3, 300), logits.to(device, copy=True)
    edit_logits(found, cases.edits_on_device(edits, device))
    sampler._edit(logits, edits)
    assert logits.isneginf().any()
    torch.testing.assert_close(found.cpu(), logits, rtol=1e-6, atol=1e-6)


def test_masks_are_those_of_the_cpus_sampler(device: torch.device) -> None:
    rng = np.random.default_rng(11)
    logits = torch.from_numpy(rng.normal(0, 5, (4, 300)).astype(np.float32))
    rows, bits = torch.tensor([0, 2]), torch.from_numpy(rng.integers(-(2**31), 2**31, (2, 10)).astype(np.int32))
    found = logits.to(device, copy=True)
    mask_logits(found, DeviceMasks(rows.to(device), bits.to(device)))
    TorchOperations().mask(logits, rows, bits)
    assert torch.equal(found.cpu(), logits)


@pytest.mark.parametrize("width", [0, 1, 20])
def test_logprobs_are_those_of_the_cpus_sampler(device: torch.device, width: int) -> None:
    """With a row that wants none, one that wants fewer, and a vocabulary that is no wider than what is wanted."""
    for vocab in (15, 3000):
        logits = cases.random_logits(np.random.default_rng(width), "usual", 4, vocab)
        chosen = torch.tensor([3, 0, 14, 7], dtype=torch.int32)
        widths = torch.tensor([-1, width, 0, width], dtype=torch.int32)
        expected = sampler._logprobs(logits, chosen.long(), widths.numpy())
        found = logprobs(logits.to(device), chosen.to(device), widths.to(device), width)
        assert found.top_ids.cpu().numpy().tolist() == expected.top_ids.tolist()
        assert found.top.cpu().numpy() == pytest.approx(expected.top, abs=2e-6)
        assert found.sampled.cpu().numpy() == pytest.approx(expected.sampled, abs=2e-6)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_named_alternatives_are_those_of_the_cpus_sampler(device: torch.device, dtype: torch.dtype) -> None:
    """A row that names its alternatives, between one that does not and one that wants none."""
    logits = cases.random_logits(np.random.default_rng(5), "usual", 3, 300).to(dtype)
    chosen, widths = torch.tensor([3, 0, 14], dtype=torch.int32), torch.tensor([2, 3, -1], dtype=torch.int32)
    named = NamedLogprobs(np.array([1]), np.array([[299, 0, 7]]))
    expected = sampler._logprobs(logits.float(), chosen.long(), widths.numpy(), named)
    on_device = logits.to(device)
    found = logprobs(on_device, chosen.to(device), widths.to(device), 3)
    own = DeviceNamed(torch.from_numpy(named.rows).to(device), torch.from_numpy(named.token_ids).to(device))
    name_alternatives(on_device, own, [found.sampled, found.top_ids, found.top])
    for row, width in ((0, 2), (1, 3)):
        assert found.top_ids[row, :width].tolist() == expected.top_ids[row, :width].tolist()
        assert found.top[row, :width].cpu().numpy() == pytest.approx(expected.top[row, :width], abs=2e-6)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_ranks_are_those_of_the_cpus_sampler(device: torch.device, dtype: torch.dtype) -> None:
    """Also of logits that have many equals, in rows that lie apart."""
    for kind in ("usual", "ties"):
        logits = cases.random_logits(np.random.default_rng(8), kind, 4, 3000).to(dtype)
        tokens = np.array([3, 0, 2999, 7], np.int32)
        expected = sampler.score(logits, tokens, 2)
        apart = torch.zeros(4, 3008, dtype=dtype)
        apart[:, :3000] = logits
        sampled, _, _, ranks = score(apart.to(device)[:, :3000], torch.from_numpy(tokens).to(device), 2)
        assert expected.ranks is not None
        assert ranks.cpu().numpy().tolist() == expected.ranks.tolist()
        assert sampled.cpu().numpy() == pytest.approx(expected.sampled, abs=2e-6)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_logprobs_of_equals_come_by_token_id(device: torch.device, dtype: torch.dtype) -> None:
    """Too many equal ones for a list of the best, and then one that is better."""
    logits = torch.full((1, 4100), -1.5, dtype=dtype)
    logits[0, 4099] = 0.0
    zeros = torch.zeros(1, dtype=torch.int32, device=device)
    found = logprobs(logits.to(device), zeros, zeros + 4, 4)
    assert found.top_ids.tolist() == [[4099, 0, 1, 2]]


def test_no_rows_are_no_work(device: torch.device) -> None:
    none, out = torch.empty(0, 50, device=device), torch.empty(0, dtype=torch.int32, device=device)
    greedy(none, out)
    draw(none, cases.on_device([], device), out)
    assert logprobs(none, out, out, 3).top.shape == (0, 3)
