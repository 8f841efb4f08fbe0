"""Random rows for checks of sampling, on any device, in the middle of memory that must not be touched."""

from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from services.engine.kernels.gpu.sampling import DeviceEdits, DeviceSampling
from services.engine.runner.base import LogitEdits
from tests.gpu.checks.sampling_oracle import Settings

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ("flat", "usual", "peaked", "ties", "banned", "rising")


def random_logits(rng: np.random.Generator, shape: str, num_rows: int, vocab: int) -> Tensor:
    """Makes float32[num_rows, vocab] on the CPU, of one of the SHAPES."""
    spread = {"flat": 0.01, "peaked": 8.0}.get(shape, 2.0)
    logits = torch.from_numpy(rng.normal(0, spread, (num_rows, vocab)).astype(np.float32))
    if shape == "ties":
        logits = logits.round()
    if shape == "rising":
        logits += torch.linspace(0, 8, vocab)
    if shape == "banned":
        logits[torch.from_numpy(rng.random((num_rows, vocab)) < 0.9)] = -torch.inf
        logits[:, int(rng.integers(vocab))] = 1.0
    return logits


def random_settings(rng: np.random.Generator, vocab: int) -> Settings:
    """Makes settings with each filter in about half of the rows, and now and then greedy."""
    return Settings(
        temperature=float(rng.choice([0, 1e-6, 0.3, 0.6, 1, 1, 1, 2.5])),
        top_k=int(rng.choice([-1, -1, -1, 0, 1, 2, 20, 50, vocab // 2, vocab, vocab + 5])),
        top_p=float(np.float32(rng.choice([1, 1, 1, 0.95, 0.5, 0.9999, 1e-6]))),
        min_p=float(np.float32(rng.choice([0, 0, 0, 0.05, 0.5, 1]))),
        seed=int(rng.integers(2**64, dtype=np.uint64)),
        position=int(rng.integers(2**20)),
    )


def on_device(rows: list[Settings], device: torch.device) -> DeviceSampling:
    """Puts the rows' settings into arrays on the device."""
    seeds = torch.from_numpy(np.array([row.seed for row in rows], np.uint64).view(np.int64))
    return DeviceSampling(
        temperature=torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device),
        top_k=torch.tensor([row.top_k for row in rows], dtype=torch.int32, device=device),
        top_p=torch.tensor([row.top_p for row in rows], dtype=torch.float32, device=device),
        min_p=torch.tensor([row.min_p for row in rows], dtype=torch.float32, device=device),
        seed=seeds.to(device),
        position=torch.tensor([row.position for row in rows], dtype=torch.int64, device=device),
        any_filtered=any(row.is_filtered for row in rows),
    )


def random_edits(rng: np.random.Generator, num_rows: int, vocab: int) -> LogitEdits:
    """Makes edits: some tokens have several biases, some of these -inf, and some have a penalty as well."""
    num_biases, num_counts = (int(n) for n in rng.integers(0, 400, 2))
    bias = rng.normal(0, 3, num_biases)
    bias[rng.random(num_biases) < 0.3] = -np.inf
    places = rng.choice(num_rows * vocab, min(num_counts, num_rows * vocab // 2), replace=False)
    return LogitEdits(
        bias_rows=rng.integers(0, num_rows, num_biases),
        bias_tokens=rng.integers(0, min(vocab, 200), num_biases),
        bias=bias.astype(np.float32),
        count_rows=places // vocab,
        count_tokens=places % vocab,
        counts=rng.integers(0, 4, len(places)).astype(np.float32),
        repetition=rng.uniform(0.8, 1.5, num_rows).astype(np.float32),
        frequency=rng.uniform(-1, 1, num_rows).astype(np.float32),
        presence=rng.uniform(-1, 1, num_rows).astype(np.float32),
    )


def edits_on_device(edits: LogitEdits, device: torch.device) -> DeviceEdits:
    """Copies the arrays to tensors on the device."""
    return DeviceEdits(*(torch.from_numpy(getattr(edits, field.name)).to(device) for field in fields(DeviceEdits)))


def padded(logits: Tensor, device: torch.device) -> Tensor:
    """Copies the logits to the device, with NaN between rows, before and after them."""
    num_rows, vocab = logits.shape
    whole = torch.full((num_rows + 2, vocab + 16 + -vocab % 16), torch.nan, dtype=logits.dtype, device=device)
    rows = whole[1:-1, :vocab]
    rows.copy_(logits)
    return rows


def guarded(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Makes int32[num_rows] of -1, and the larger tensor that it is a part of."""
    whole = torch.full((num_rows + 64,), -1, dtype=torch.int32, device=device)
    return whole[32:-32], whole


def unguarded(out: Tensor, whole: Tensor) -> list[int]:
    """Returns the written elements. Raises AssertionError if anything was written next to them."""
    assert int((whole == -1).sum()) == 64 + int((out == -1).sum()), "written next to the output"
    tokens: list[int] = out.tolist()
    return tokens
