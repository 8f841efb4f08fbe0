"""Decode steps against the floor that memory sets: weights and KV read once, at the rate of a copy.

A cell whose KV does not fit is left out, with the size that it would have, and tried with FP8 KV.
"""

from collections.abc import Iterator, Sequence

import torch

from loadtest.gpu.bench_model import FP8, BenchModel, decode_step, steady
from loadtest.gpu.card import Card
from loadtest.tables import Record
from services.engine.runner.gpu.gpu_runner import StepLimits

BATCHES = (1, 8, 64, 256)
CONTEXTS = (512, 4096, 32_768)
_FIRST = ((64, 4096), (256, 4096))  # cells that have a budget; the second one with FP8 KV
_ALSO_FP8 = _FIRST[1]
_ROUNDS = 20
_KEPT_BYTES = 6 << 30  # of the card's memory, for activations and libraries

Cell = tuple[int, int]  # batch, context


def measure(
    model: BenchModel, card: Card, cells: Sequence[Cell] | None = None, rounds: int = _ROUNDS
) -> Iterator[Record]:
    """Yields a record for each cell, and one more where there is one with FP8 KV."""
    for batch, context in cells or default_cells(model.config.max_position_embeddings):
        kv_dtypes = [model.dtype]
        if not fits(model, card, batch, context, model.dtype) or (batch, context) == _ALSO_FP8:
            kv_dtypes.append(FP8)
        for kv_dtype in kv_dtypes:
            yield _record(model, card, batch, context, kv_dtype, rounds)


def default_cells(longest: int) -> list[Cell]:
    """Lists all batches and contexts, those with a budget first. longest: tokens that a sequence may have."""
    contexts = sorted({min(context, longest) for context in CONTEXTS})
    cells = [(batch, context) for context in contexts for batch in BATCHES]
    return sorted(cells, key=lambda cell: cell not in _FIRST)


def _record(model: BenchModel, card: Card, batch: int, context: int, kv_dtype: torch.dtype, rounds: int) -> Record:
    about: Record = {
        "model": model.name,
        "batch": batch,
        "context": context,
        "kv": str(kv_dtype).removeprefix("torch."),
        "kv_gib": kv_bytes(model, batch, context, kv_dtype) / 2**30,
    }
    if not fits(model, card, batch, context, kv_dtype):
        return {**about, "skipped": "its KV does not fit"}
    floor = floor_s(model, card, batch, context, kv_dtype)
    limits = StepLimits(max_num_seqs=batch, max_num_batched_tokens=batch, max_model_len=context)
    step = decode_step(batch, context)
    runner = model.runner(int(step.tokens.block_tables.max()) + 1, limits, kv_dtype)
    taken = steady(runner, step, rounds)
    return {
        **about,
        "step_ms": taken.wall * 1e3,
        "floor_ms": floor * 1e3,
        "of_floor": floor / taken.wall,
        "tokens_per_s": batch / taken.wall,
        "cpu_ms": taken.cpu * 1e3,
    }


def floor_s(model: BenchModel, card: Card, batch: int, context: int, kv_dtype: torch.dtype) -> float:
    """Computes the seconds in which the card can read the weights and KV of a step."""
    return (model.weight_bytes + kv_bytes(model, batch, context, kv_dtype)) / card.bytes_per_s


def fits(model: BenchModel, card: Card, batch: int, context: int, kv_dtype: torch.dtype) -> bool:
    """Tells whether the card has room for weights, KV and all else that a step needs."""
    return model.weight_bytes + kv_bytes(model, batch, context, kv_dtype) + _KEPT_BYTES < card.total_bytes


def kv_bytes(model: BenchModel, batch: int, context: int, kv_dtype: torch.dtype) -> int:
    """Counts the bytes of K and V of all tokens."""
    config = model.config
    return int(batch * context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_dtype.itemsize)
