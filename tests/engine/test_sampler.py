"""Sampling: the filters exactly, the distribution statistically, the randomness reproducibly."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.engine.runner.base import NOT_FINITE, NamedLogprobs, SamplingBatch, TokenMasks
from services.engine.runner.cpu.sampler import NUM_CANDIDATES, _invert, sample, score, uniforms
from services.engine.sampling.logit_edits import edits_of, gather_edits
from services.protocol.sampling import FEW_ALTERNATIVES, SamplingParams

PROBABILITIES = [0.35, 0.25, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01]


def batch(num_rows: int, **settings: Any) -> SamplingBatch:
    """Rows with the same settings, or with a list of them; by default each has its own seed."""
    defaults = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "position": 5, "num_logprobs": -1}
    values = defaults | {"seed": np.arange(num_rows)} | settings
    dtypes = {"top_k": np.int32, "seed": np.uint64, "position": np.int64, "num_logprobs": np.int32}
    edits, named = values.pop("edits", None), values.pop("named", None)
    arrays = {
        name: np.ascontiguousarray(np.broadcast_to(np.asarray(value, dtypes.get(name, np.float32)), (num_rows,)))
        for name, value in values.items()
    }
    return SamplingBatch(
        **arrays,
        edits=edits,
        named=named,
        all_greedy=bool((arrays["temperature"] == 0).all()),
        any_logprobs=bool((arrays["num_logprobs"] >= 0).any()),
    )


def logits_of(probabilities: list[float], num_rows: int) -> torch.Tensor:
    return torch.tensor(probabilities).log().repeat(num_rows, 1)


def counts(probabilities: list[float], num_rows: int = 4000, **settings: Any) -> np.ndarray:
    drawn = sample(logits_of(probabilities, num_rows), batch(num_rows, **settings)).token_ids
    return np.bincount(drawn, minlength=len(probabilities))


def assert_drawn_from(found: np.ndarray, expected: list[float]) -> None:
    """Chi-square at about the 99.9 % point for up to 7 degrees of freedom; nothing outside the support."""
    wanted = np.array(expected) / sum(expected) * found.sum()
    support = wanted > 0
    assert found[~support].sum() == 0
    assert ((found[support] - wanted[support]) ** 2 / wanted[support]).sum() < 24.3


def test_named_alternatives_have_the_logprobs_of_the_raw_distribution() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    named = NamedLogprobs(np.array([0, 2]), np.array([[7, 3, 0], [4, 0, 9]]))
    found = sample(logits.clone(), batch(3, temperature=0, num_logprobs=[3, 2, 3], named=named)).logprobs
    assert found is not None
    expected = logits.log_softmax(-1)
    for row, ids in ((0, [7, 3, 0]), (2, [4, 0, 9])):
        assert found.top_ids[row].tolist() == ids
        assert np.allclose(found.top[row], expected[row, ids])
    assert found.top_ids[1, :2].tolist() == logits[1].topk(2).indices.tolist()


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    assert sample(logits.clone(), batch(5, temperature=0)).token_ids.tolist() == logits.argmax(-1).tolist()


def test_unfiltered_rows_follow_the_distribution() -> None:
    assert_drawn_from(counts(PROBABILITIES), PROBABILITIES)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_or_flattens(temperature: float) -> None:
    assert_drawn_from(counts(PROBABILITIES, temperature=temperature), [p ** (1 / temperature) for p in PROBABILITIES])


def test_top_p_is_a_share_of_what_top_k_leaves() -> None:
    """With as many tokens as the sampler looks at first, out of more."""
    falling = np.linspace(1.1, 0.9, NUM_CANDIDATES)
    probabilities = np.concatenate([falling, np.full(3 * NUM_CANDIDATES, 1 / 3)])  # the first ones are half of it all
    found = counts((probabilities / probabilities.sum()).tolist(), 500, top_k=NUM_CANDIDATES, top_p=0.5)
    assert found[: NUM_CANDIDATES // 2].sum() == 500


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [0.0, -1000.0, 1000.0])
def test_greedy_finds_the_first_of_the_highest_in_every_dtype(dtype: torch.dtype, shift: float) -> None:
    """Rounding makes ties, and with a shift down all are negative."""
    logits = (torch.randn(5, 500, generator=torch.Generator().manual_seed(1)) * 3 + shift).to(dtype)
    logits[0] = 0.0
    logits[1, 17] = torch.finfo(dtype).max
    logits[2] = torch.finfo(dtype).min
    logits[2, 3] = -0.0
    expected = logits.to(torch.float32).argmax(-1).tolist()
    assert sample(logits.clone(), batch(5, temperature=0)).token_ids.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("all_of_them", [False, True])
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": [0, 1, 1, 0]}, {"top_k": 3, "top_p": 0.5}])
def test_a_row_with_a_logit_that_is_not_finite_gets_no_token(
    settings: dict[str, Any], all_of_them: bool, value: float, dtype: torch.dtype
) -> None:
    """Not even where that logit is banned or masked. A row of which tokens are only banned is no such row."""
    logits = torch.randn(4, 70, generator=torch.Generator().manual_seed(2)).to(dtype)
    clean = logits.clone()
    logits[2, slice(None) if all_of_them else 41] = value
    edits = gather_edits([(row, None, np.zeros(1, np.int32), np.array([41, 5], np.int32)) for row in (1, 2)], 4)
    bits = np.full((2, 3), 0xFFFF, dtype=np.uint32)  # without token 41
    masks = TokenMasks(np.array([2, 3]), lambda: bits)
    for edit in (None, edits, replace(edits, masks=masks), replace(gather_edits([], 4), masks=masks)):
        found = sample(logits.clone(), batch(4, **settings, edits=edit)).token_ids
        expected = sample(clean.clone(), batch(4, **settings, edits=edit)).token_ids
        expected[2] = NOT_FINITE
        assert found.tolist() == expected.tolist()
    assert np.isnan(score(logits, np.zeros(4, np.int32), 2).sampled).tolist() == [False, False, True, False]


def test_a_tiny_temperature_is_greedy_in_effect() -> None:
    assert counts(PROBABILITIES, temperature=1e-30)[0] == 4000


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 1}, 1),
        ({"top_k": 3}, 3),
        ({"top_k": 0}, 8),
        ({"top_k": 8}, 8),
        ({"top_k": 100}, 8),
        ({"top_p": 0.3}, 1),
        ({"top_p": 0.5}, 2),
        ({"top_p": 0.61}, 3),
        ({"top_p": 0.995}, 8),
        ({"top_p": 1e-9}, 1),
        ({"min_p": 0.2}, 5),  # 0.2 * 0.35 = 0.07
        ({"min_p": 1.0}, 1),
        ({"top_k": 4, "top_p": 0.7}, 2),  # 0.7 of the 0.85 that top_k left: 0.595
        ({"top_k": 6, "min_p": 0.2}, 5),
        ({"top_p": 0.97, "min_p": 0.05}, 6),  # 0.05 * 0.35 = 0.0175 would keep seven
        ({"top_p": 0.7, "min_p": 0.5}, 2),  # 0.7 of the 0.6 that min_p leaves: 0.42
        ({"top_p": 0.5, "min_p": 0.5}, 1),  # 0.5 of these 0.6: the likeliest alone
        ({"top_k": 4, "top_p": 0.55, "min_p": 0.5}, 1),  # of 0.6 again: min_p leaves fewer than top_k
    ],
)
def test_filters_keep_exactly_the_likeliest(settings: dict[str, Any], kept: int) -> None:
    assert_drawn_from(counts(PROBABILITIES, **settings), PROBABILITIES[:kept] + [0.0] * (8 - kept))


def expected_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Computes each token's probability by vLLM's order of filters, in float64; no two logits may be equal."""
    weights = np.exp((logits - logits.max()) / temperature)
    weights[weights < min_p] = 0
    falling = np.argsort(-weights, kind="stable")
    weights[falling[top_k if top_k > 0 else len(logits) :]] = 0
    sums = np.cumsum(weights[falling])
    weights[falling[sums - weights[falling] >= top_p * sums[-1]]] = 0
    share: np.ndarray = weights / weights.sum()
    return share


@pytest.mark.few(10)
@pytest.mark.parametrize("seed", range(40))
def test_random_mixes_of_filters_draw_by_the_distribution_of_the_reference(seed: int) -> None:
    """Rare tokens are counted together; the bound is near the 99.99 % point of chi-square."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, int(rng.choice([5, 40, 1500]))).astype(np.float32)
    mix: dict[str, Any] = {
        "temperature": float(rng.choice([0.3, 0.8, 1.0, 1.7])),
        "top_k": int(rng.choice([-1, 1, 2, 7, 30])),
        "top_p": float(rng.choice([1.0, 0.97, 0.6, 0.2, 1e-9])),
        "min_p": float(rng.choice([0.0, 0.02, 0.2, 0.6])),
    }
    wanted = 2000 * expected_distribution(logits.astype(np.float64), **mix)
    rows = torch.from_numpy(logits).repeat(2000, 1)
    drawn = sample(rows, batch(2000, seed=rng.integers(0, 2**63, 2000), **mix)).token_ids
    found = np.bincount(drawn, minlength=len(logits))
    assert found[wanted == 0].sum() == 0, mix
    often = wanted >= 8
    found = np.append(found[often], found[~often].sum())
    wanted = np.append(wanted[often], wanted[~often].sum())
    degrees = max(1, len(wanted) - 1)
    square = ((found - wanted) ** 2 / np.maximum(wanted, 1)).sum()
    assert square < degrees + 4 * np.sqrt(2 * degrees) + 8, mix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alone", [{"top_k": 1}, {"top_p": 1e-9}], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_a_filter_that_leaves_one_token_leaves_that_of_a_greedy_row(
    seed: int, alone: dict[str, Any], dtype: torch.dtype
) -> None:
    """Of equal logits, and of those that differ by less than a weight shows, beside any other settings."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 1e-3 if seed % 3 == 0 else 1, (300, 50)).astype(np.float32))
    if seed % 3 == 1:
        logits = logits.round()
    logits = (logits + float(rng.choice([0, -9]))).to(dtype)
    others = {
        "temperature": rng.choice([1e-6, 0.7, 2.0], 300),
        "top_p": rng.choice([1, 0.5], 300),
        "min_p": rng.choice([0, 0.3, 1], 300),
        "seed": rng.integers(0, 2**63, 300),
    }
    edits = edits_of(SamplingParams(max_tokens=9, repetition_penalty=1.3, logit_bias=((5, 2.0),)), num_prompt=1)
    tokens = [rng.integers(0, 50, 6).astype(np.int32) for _ in range(300)]
    rows = [(row, edits, tokens[row], np.zeros(0, np.int32)) for row in range(0, 300, 2)]
    edited = {"edits": gather_edits(rows, 300)}
    greedy = sample(logits.clone(), batch(300, temperature=0, **edited)).token_ids
    drawn = sample(logits.clone(), batch(300, **(others | alone), **edited)).token_ids
    assert drawn.tolist() == greedy.tolist()


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 1500}, {"top_k": 2500, "top_p": 0.8}])
def test_filters_that_reach_beyond_the_candidates(settings: dict[str, Any]) -> None:
    """A nearly flat distribution over 3000 tokens: what is drawn is what sorting all of them would allow."""
    vocab = 3000
    ranks = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))
    logits = -1e-4 * ranks.float()
    probabilities = logits.double().softmax(-1).sort(descending=True).values
    head = probabilities[: settings.get("top_k", vocab)]
    allowed = int((head.cumsum(0) - head < settings.get("top_p", 1.0) * head.sum()).sum())
    assert allowed > NUM_CANDIDATES
    drawn = sample(logits.repeat(1000, 1), batch(1000, **settings)).token_ids
    drawn_ranks = ranks[torch.from_numpy(drawn).long()].numpy()
    assert allowed * 0.97 < drawn_ranks.max() < allowed
    assert_drawn_from(np.histogram(drawn_ranks, bins=5, range=(0, allowed))[0], [1 + 2e-5, 1, 1, 1, 1])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Mixed settings in one batch: each row draws what it draws alone."""
    logits = 3 * torch.randn(40, 2000, generator=torch.Generator().manual_seed(1))
    rng = np.random.default_rng(1)
    settings = {
        "temperature": rng.choice([0, 0.7, 1.3], 40),
        "top_k": rng.choice([-1, 5, 1200], 40),
        "top_p": rng.choice([1, 0.6, 0.999], 40),
        "min_p": rng.choice([0, 0.1], 40),
        "seed": rng.integers(0, 2**63, 40),
        "position": rng.integers(1, 1000, 40),
    }
    together = sample(logits.clone(), batch(40, **settings)).token_ids
    for row in range(40):
        own = {name: values[row] for name, values in settings.items()}
        assert sample(logits[row : row + 1].clone(), batch(1, **own)).token_ids[0] == together[row]


def test_uniforms_are_a_function_of_seed_and_position() -> None:
    """Pinned: another value would break the continuation of running requests by a newer worker."""
    seeds = np.array([0, 0, 1, 2**64 - 1], np.uint64)
    found = uniforms(seeds, np.array([0, 1, 0, 12345]))
    assert found.dtype == np.float32
    assert found.tolist() == [0.6524484753608704, 0.7012121081352234, 0.3681895136833191, 0.14507073163986206]


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_uniforms_are_uniform_and_unrelated(along: str) -> None:
    numbers, zeros = np.arange(50_000), np.zeros(50_000, np.int64)
    drawn = (
        uniforms(numbers.astype(np.uint64), zeros) if along == "seeds" else uniforms(zeros.astype(np.uint64), numbers)
    )
    assert 0 <= drawn.min() < drawn.max() < 1
    cells = np.histogram(drawn, bins=100, range=(0, 1))[0]
    assert ((cells - 500.0) ** 2 / 500).sum() < 149.5  # 99.9 % point of chi-square with 99 degrees of freedom
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.015


def test_edits_change_what_is_drawn_but_not_the_logprobs() -> None:
    """Tokens 0 and 3 are banned, token 5 is four times as likely as before."""
    edits = edits_of(SamplingParams(max_tokens=9, logit_bias=((5, np.log(4)),)), num_prompt=1)
    rows = [(row, edits, np.array([7], np.int32), np.array([0, 3], np.int32)) for row in range(4000)]
    drawn = sample(logits_of(PROBABILITIES, 4000), batch(4000, num_logprobs=1, edits=gather_edits(rows, 4000)))
    found = np.bincount(drawn.token_ids, minlength=8)
    assert_drawn_from(found, [0.0, 0.25, 0.15, 0.0, 0.08, 0.16, 0.02, 0.01])
    assert drawn.logprobs is not None
    assert set(drawn.logprobs.top_ids[:, 0].tolist()) == {0}
    assert np.exp(drawn.logprobs.sampled) == pytest.approx([PROBABILITIES[token] for token in drawn.token_ids])


def test_only_the_rows_that_ask_are_edited() -> None:
    edits = gather_edits([(1, None, np.array([7], np.int32), np.array([0], np.int32))], 3)
    assert sample(logits_of(PROBABILITIES, 3), batch(3, temperature=0, edits=edits)).token_ids.tolist() == [0, 1, 0]


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Before temperature and filters, best first; rows that asked for fewer are as wide as the widest."""
    output = sample(
        logits_of(PROBABILITIES, 3), batch(3, temperature=[0.3, 0, 1], top_k=[1, -1, 2], num_logprobs=[3, -1, 0])
    )
    found = output.logprobs
    assert found is not None
    assert [str(part.dtype) for part in (found.sampled, found.top_ids, found.top)] == ["float32", "int32", "float32"]
    assert found.top.shape == found.top_ids.shape == (3, 3)
    assert found.top_ids[0].tolist() == [0, 1, 2]
    assert np.exp(found.top[0]) == pytest.approx(PROBABILITIES[:3])
    assert np.exp(found.sampled[[0, 2]]) == pytest.approx([PROBABILITIES[token] for token in output.token_ids[[0, 2]]])


def test_rows_that_ask_for_many_alternatives_have_them_apart() -> None:
    """As many as they ask for, up to all, the best first; the arrays of all rows stay as narrow as FEW_ALTERNATIVES."""
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(6))
    logits[1] = logits[1].round()
    expected, widths = logits.log_softmax(-1), [3, 500, -1, 200]
    sampled = sample(logits.clone(), batch(4, temperature=0, num_logprobs=widths)).logprobs
    scored = score(logits.clone(), np.zeros(4, np.int32), 3, [(1, 500), (3, 200)])
    assert sampled is not None
    assert (sampled.top.shape[1], scored.top.shape[1]) == (FEW_ALTERNATIVES, 3)
    for found in (sampled, scored):
        assert sorted(found.wide) == [1, 3]
        for row, width in ((1, 500), (3, 200)):
            ids, values = found.alternatives(row, width)
            order = np.lexsort((np.arange(500), -logits[row].numpy()))[:width]
            assert ids.dtype == np.int32
            assert ids.tolist() == order.tolist()
            assert values == pytest.approx(expected[row, order].numpy(), abs=1e-6)
        assert found.alternatives(0, 3)[0].tolist() == logits[0].topk(3).indices.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_counts_the_tokens_that_are_at_least_as_likely(dtype: torch.dtype) -> None:
    """Equals included, so that tokens outside the K best have ranks above K; of a row with NaN, there is none."""
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(3)).to(dtype)
    logits[1] = logits[1].round()  # many equals
    logits[2, 7] = float("nan")
    tokens = np.array([250, 31, 0, int(logits[3].argmax())], np.int32)
    found = score(logits.clone(), tokens, 5)
    values = logits.double().numpy()
    expected = [int(np.sum(row >= row[token])) for row, token in zip(values, tokens, strict=True)]
    assert found.ranks is not None
    assert found.ranks.dtype == np.int32
    assert found.ranks[[0, 1, 3]].tolist() == [expected[0], expected[1], 1]
    assert expected[1] > 1 + int(np.sum(values[1] > values[1, 31]))
    for row in (0, 1):
        assert (tokens[row] in found.top_ids[row]) == (found.ranks[row] <= 5)


def test_no_token_without_weight_at_the_upper_end() -> None:
    """The largest uniform number still finds a token that has weight."""
    weights = torch.tensor([[1.0, 1e-3, 0.3, 0.0, 0.0]]).repeat(3, 1)
    largest = torch.tensor([0.0, 1 - 2.0**-24, 1.0])
    assert _invert(weights, largest).tolist() == [0, 2, 2]
