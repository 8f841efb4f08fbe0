"""Checks of sampling: random rows with random settings against the oracle, edges of filters, frequencies, edits.

A drawn token's error is by how much its race time exceeds the winner's: 0 or rounding, unless another token is meant.
"""

import numpy as np
import torch
from torch import Tensor

from services.engine.kernels.gpu.sampling import draw, edit_logits, greedy, logprobs
from tests.gpu.checks.result import Check
from tests.gpu.checks.sampling_cases import (
    DTYPES,
    SHAPES,
    edits_on_device,
    guarded,
    on_device,
    padded,
    random_edits,
    random_logits,
    random_settings,
    unguarded,
)
from tests.gpu.checks.sampling_oracle import Settings, at_the_edge, lateness

_SMALL_VOCABS = (1, 7, 100, 2049, 4103, 8192)
_VOCABS = (1000, 32000, 50257, 128256, 151936, 262208)
_RACE_BOUND = 1e-4  # numbers and weights are float32; other tokens are seldom so close


def check(device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """Checks `num_cases` cases of each kind. On a GPU vocabularies are as large as those of models."""
    rng = np.random.default_rng(seed)
    vocabs = _VOCABS if device.type == "cuda" else _SMALL_VOCABS
    checks = []
    for case in range(num_cases):
        shape, dtype = SHAPES[case % len(SHAPES)], DTYPES[case % len(DTYPES)]
        vocab, name = int(rng.choice(vocabs)), f"{shape} {dtype} case {case}"
        logits = random_logits(rng, shape, 4, vocab).to(dtype)
        checks.append(check_greedy(f"greedy {name} vocab {vocab}", logits, device))
        settings = [random_settings(rng, vocab) for _ in logits]
        checks.append(check_draw(f"draw {name} vocab {vocab}", logits, settings, device))
        raw = logits.clamp(min=-1000)  # before edits nothing is banned
        checks += check_logprobs(f"logprobs {name} vocab {vocab}", raw, int(rng.integers(0, 21)), device)
        checks.append(check_edge(rng, int(rng.choice(vocabs)), device))
        checks.append(check_edits(rng, vocab, device))
        if case % 3 == 0:
            checks.append(check_not_finite(rng, vocab, dtype, device))
    checks.append(check_frequencies(seed, device, 20_000 if device.type == "cuda" else 120))
    if device.type == "cuda":
        checks += [check_graph(rng, device), check_far_rows(device)]
    return checks


def drawn(logits: Tensor, settings: list[Settings], device: torch.device) -> list[int]:
    """Draws a token for each row of [N, vocab] on the CPU. Raises AssertionError if `draw` writes elsewhere."""
    out, whole = guarded(len(settings), device)
    draw(padded(logits, device), on_device(settings, device), out, edited=True)
    return unguarded(out, whole)


def check_draw(name: str, logits: Tensor, settings: list[Settings], device: torch.device) -> Check:
    """Checks the rows' drawn tokens by the one that is farthest from winning."""
    tokens = drawn(logits, settings, device)
    rows = zip(logits.float().numpy(), settings, tokens, strict=True)
    return Check(name, float(np.max([lateness(row, setting, token) for row, setting, token in rows])), _RACE_BOUND)


def check_greedy(name: str, logits: Tensor, device: torch.device) -> Check:
    """Counts the rows whose token is not the first of the highest."""
    out, whole = guarded(len(logits), device)
    greedy(padded(logits, device), out, edited=True)
    expected = logits.float().numpy().argmax(axis=1).tolist()
    wrong = sum(token != best for token, best in zip(unguarded(out, whole), expected, strict=True))
    return Check(name, float(wrong), 0.0)


def check_edge(rng: np.random.Generator, vocab: int, device: torch.device) -> Check:
    """Checks a nearly flat or stepped row in which the last kept token wins, and one more kept token would."""
    kind = int(rng.integers(5))
    few, many = int(rng.integers(1, min(vocab, 60) + 1)), int(rng.integers(1, vocab + 1))
    settings = Settings(
        temperature=float(rng.choice([0.5, 1.0, 2.0])),
        top_k=[few, many, -1, -1, many][kind],
        top_p=[1.0, 1.0, float(rng.random()) + 1e-9, 1.0, float(rng.random()) + 1e-9][kind],
        min_p=[0.0, 0.0, 0.0, 0.97, 0.0][kind],
        seed=int(rng.integers(2**64, dtype=np.uint64)),
    )
    falling = np.linspace(3, 3 - 0.1 * min(1.0, vocab / 1000), vocab, dtype=np.float32)
    step = int(rng.integers(2, max(3, vocab // 2))) if rng.random() < 0.5 else 1
    logits = torch.from_numpy(at_the_edge(falling[np.arange(vocab) // step * step], settings))[None]
    return check_draw(f"edge {settings} vocab {vocab}", logits, [settings], device)


def check_frequencies(seed: int, device: torch.device, num_rows: int) -> Check:
    """Checks the chi-square of tokens drawn from 5 of 8, as a share of its 99.9 % point for 4 degrees of freedom."""
    weights = np.array([0.35, 0.25, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01])
    rows = [Settings(top_k=5, seed=seed, position=position) for position in range(num_rows)]
    tokens = drawn(torch.from_numpy(np.log(weights)).float().expand(num_rows, -1), rows, device)
    found, wanted = np.bincount(tokens, minlength=8)[:5], weights[:5] / weights[:5].sum() * num_rows
    lost = num_rows - found.sum()
    return Check("frequencies", float(((found - wanted) ** 2 / wanted).sum() / 18.47 + lost), 1.0)


def check_logprobs(name: str, logits: Tensor, width: int, device: torch.device) -> list[Check]:
    """Checks values and token ids of all rows but the first, which wants none."""
    chosen = torch.arange(len(logits), dtype=torch.int32, device=device) % logits.shape[1]
    widths = torch.full((len(logits),), width, dtype=torch.int32, device=device)
    widths[0] = -1
    found = logprobs(padded(logits, device), chosen, widths, width)
    raw = logits.double()
    expected = raw.log_softmax(dim=-1)
    ids = np.argsort(-raw.numpy(), axis=1, kind="stable")[:, :width]
    expected[0] = 0
    ids[0] = 0
    top = expected.gather(1, torch.from_numpy(ids))
    return [
        Check(f"{name}: sampled", _error(found.sampled, expected.gather(1, chosen.cpu().long()[:, None])[:, 0]), 1e-5),
        Check(f"{name}: best", _error(found.top, top), 1e-5),
        Check(f"{name}: wrong ids", float((found.top_ids.cpu().numpy() != ids).sum()), 0.0),
    ]


def check_edits(rng: np.random.Generator, vocab: int, device: torch.device) -> Check:
    """Checks logits after random edits: -inf where it must be, and nothing changed next to rows."""
    logits = torch.from_numpy(rng.normal(0, 5, (3, vocab)).astype(np.float32))
    edits = random_edits(rng, 3, vocab)
    expected = logits.double().numpy()
    np.add.at(expected, (edits.bias_rows, edits.bias_tokens), edits.bias.astype(np.float64))
    rows, values = edits.count_rows, expected[edits.count_rows, edits.count_tokens]
    values = np.where(values > 0, values / edits.repetition[rows], values * edits.repetition[rows].astype(np.float64))
    values -= edits.frequency[rows].astype(np.float64) * edits.counts + edits.presence[rows] * (edits.counts > 0)
    expected[rows, edits.count_tokens] = values
    found = padded(logits, device)
    whole = found._base
    edit_logits(found, edits_on_device(edits, device))
    assert whole is not None
    assert int(whole.isnan().sum()) == whole.numel() - found.numel(), "written next to the logits"
    return Check(f"edits vocab {vocab}", _error(found, torch.from_numpy(expected)), 1e-5)


def check_graph(rng: np.random.Generator, device: torch.device) -> Check:
    """Counts the tokens that differ between a CUDA graph's replays and launches without a graph. Only on a GPU."""
    rows = [random_settings(rng, 32000) for _ in range(16)]
    logits, params = torch.zeros(16, 32000, device=device), on_device(rows, device)
    replayed, out = torch.full((2, 16), -1, dtype=torch.int32, device=device)
    draw(logits, params, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draw(logits, params, replayed)
    wrong = 0
    for seed in range(3):
        logits.copy_(random_logits(rng, "usual", 16, 32000))
        params.seed.fill_(seed)
        graph.replay()
        draw(logits, params, out)
        wrong += int((replayed != out).sum())
    return Check("tokens of a replayed graph", float(wrong), 0.0)


def check_far_rows(device: torch.device) -> Check:
    """Counts the wrong tokens in rows that an int32 offset does not reach. Takes 5 GB, so only on a GPU."""
    logits = torch.zeros(16_500, 131_072, dtype=torch.bfloat16, device=device)
    logits[:, 77] = 1.0
    logits[-100:, 130_000] = 30.0
    rows = [Settings(temperature=float(row % 2), top_k=1) for row in range(len(logits))]
    outs = torch.full((3, len(logits)), -1, dtype=torch.int32, device=device)
    draw(logits, on_device(rows, device), outs[0])
    greedy(logits, outs[1])
    outs[2] = logprobs(logits, outs[1], torch.ones_like(outs[1]), 1).top_ids[:, 0]
    expected = torch.full_like(outs, 77)
    expected[:, -100:] = 130_000
    return Check("rows beyond 2**31 elements", float((outs != expected).sum()), 0.0)


def check_not_finite(rng: np.random.Generator, vocab: int, dtype: torch.dtype, device: torch.device) -> Check:
    """Counts the rows in which a number that is not finite goes unnoticed, and the others in which one is seen.

    Of three rows the first has one such number, at any place, the second is -inf at that place, and the third is sound.
    Edited ones may be -inf.
    """
    logits, place = random_logits(rng, "usual", 3, vocab).to(dtype), int(rng.integers(vocab))
    logits[1, place] = -torch.inf
    settings = [random_settings(rng, vocab) for _ in logits]
    rows, wrong = padded(logits, device), 0
    for edited in (False, True):
        rows[0, place] = float(rng.choice([torch.nan, torch.inf])) if not edited else torch.nan
        expected = [True, not edited, False]
        out = torch.zeros(2, 3, dtype=torch.int32, device=device)
        greedy(rows, out[0], edited=edited)
        draw(rows, on_device(settings, device), out[1], edited=edited)
        wrong += int((out.cpu().eq(-1) != torch.tensor(expected)).sum())
    zeros = torch.zeros(3, dtype=torch.int32, device=device)
    found = logprobs(rows, zeros - 1, zeros, 0).sampled
    wrong += sum(odd != expected for odd, expected in zip(found.isnan().tolist(), [True, True, False], strict=True))
    return Check(f"not finite {dtype} vocab {vocab}", float(wrong), 0.0)


def _error(out: Tensor, reference: Tensor) -> float:
    """Computes ‖out - reference‖ / ‖reference‖ of finite elements; infinity where only one of both is finite."""
    out = out.cpu().double()
    if not torch.equal(out.isneginf(), reference.isneginf()):
        return float("inf")
    out, reference = out.nan_to_num(nan=torch.nan, neginf=0.0), reference.nan_to_num(neginf=0.0)
    return float((out - reference).norm() / reference.norm().clamp(min=1e-30))
