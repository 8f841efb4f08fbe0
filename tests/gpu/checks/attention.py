"""Paged attention on random steps, against attention row by row in float64."""

import math

import numpy as np
import torch
from torch import Tensor

from tests.gpu.checks.attention_step import Case, Step
from tests.gpu.checks.errors import BOUNDS, compare
from tests.gpu.checks.result import Check


def run_case(case: Case, device: torch.device) -> list[Check]:
    """Checks the output and log-sum-exp of all layers, and which elements of the pool were written."""
    step = Step(case, device)
    before = step.pool.clone()
    checks = []
    for layer, (out, lse) in enumerate(step.run()):
        expected, expected_lse = step.expected(layer)
        checks.append(compare(f"{case.name}, layer {layer}", out, expected, case.dtype))
        lse_error = _error_of_all(lse, expected_lse)
        checks.append(Check(f"{case.name}, layer {layer}, log-sum-exp", lse_error, BOUNDS[case.dtype]))
    new = sum(case.counts) * 2 * case.num_layers * case.num_kv_heads * case.head_dim
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[before.dtype.itemsize]
    changed = int((before.view(raw) != step.pool.view(raw)).sum())
    checks.append(Check(f"{case.name}, elements of the pool written, but for the new tokens'", abs(changed - new), 0))
    checks.append(Check(f"{case.name}, elements written beyond the outputs", step.num_strays, 0))
    return checks


def random_case(rng: np.random.Generator, max_tokens: int, dtypes: tuple[torch.dtype, ...]) -> Case:
    """Makes a case of any kind, with rows of up to max_tokens tokens."""
    block_size = int(rng.choice([8, 16, 32, 64]))
    num_rows = int(rng.integers(1, 7))
    seq_lens = np.exp(rng.uniform(0, math.log(max_tokens), num_rows)).astype(int)
    border = rng.random(num_rows) < 0.3
    seq_lens = np.where(border, -(-seq_lens // block_size) * block_size + rng.integers(0, 2, num_rows), seq_lens)
    counts = np.where(rng.random(num_rows) < 0.6, 1, rng.integers(1, np.minimum(seq_lens, 600) + 1))
    dtype = dtypes[rng.integers(len(dtypes))]
    options: dict[str, object] = {}
    if rng.random() < 0.4:
        counts = np.ones_like(seq_lens)
        options["padded_rows"] = num_rows + int(rng.integers(0, 3))
    if rng.random() < 0.3:
        options["window"] = int(rng.choice([1, 7, 50, 100, 1000]))
    if rng.random() < 0.3:
        options["split_keys"] = int(rng.choice([128, 256]))
    return Case(
        seq_lens=tuple(map(int, seq_lens)),
        counts=tuple(map(int, counts)),
        num_kv_heads=int(rng.choice([1, 2, 3])),
        group=int(rng.choice([1, 2, 3, 4, 5, 8, 12, 16])),
        head_dim=int(rng.choice([16, 40, 64, 80, 96, 128, 256])),
        block_size=block_size,
        dtype=dtype,
        fp8=bool(dtype != torch.float32 and rng.random() < 0.4),
        num_multiprocessors=int(rng.choice([1, 8, 60, 500])),
        seed=int(rng.integers(1 << 30)),
        **options,  # type: ignore[arg-type]
    )


def shared_case(rng: np.random.Generator, num_rows: int, prefix: int, dtype: torch.dtype) -> Case:
    """Makes two groups of decode rows with a prefix each, the second's shorter but for some rows, and one row alone."""
    prefixes = prefix, prefix // 2
    middle, nested = num_rows // 2, num_rows // 2 + max(2, num_rows // 6)
    lengths = [prefixes[row >= middle] + int(rng.integers(1, 200)) for row in range(num_rows)]
    lengths[middle:nested] = [prefix + int(rng.integers(1, 200)) for _ in range(middle, nested)]
    return Case(
        seq_lens=(*lengths, 70),
        counts=(1,) * (num_rows + 1),
        shared=((0, middle, prefixes[0]), (middle, num_rows, prefixes[1]), (middle, nested, prefixes[0])),
        group=int(rng.choice([1, 3, 4, 8])),
        dtype=dtype,
        padded_rows=num_rows + 4 if rng.random() < 0.5 else None,
        seed=int(rng.integers(1 << 30)),
    )


def check(device: torch.device, seed: int, num_cases: int, max_tokens: int | None = None) -> list[Check]:
    """Checks random cases, about one in eight with shared prefixes; smaller ones where kernels are interpreted."""
    rng = np.random.default_rng(seed)
    dtypes = (torch.float32, torch.bfloat16)
    tokens, rows = (256, 12) if device.type == "cpu" else (2048, 80)
    tokens = max_tokens or tokens
    checks = []
    for _ in range(num_cases):
        if rng.random() < 1 / 8:
            case = shared_case(rng, int(rng.integers(8, rows)), tokens // 64 * 64, dtypes[rng.integers(2)])
        else:
            case = random_case(rng, tokens, dtypes)
        checks += run_case(case, device)
    return checks


def _error_of_all(out: Tensor, expected: Tensor) -> float:
    """Computes the relative error of all rows together: a single log-sum-exp may be next to 0."""
    return float((out.double() - expected).norm() / expected.norm())
