"""Weights in codes beside the same weights in numbers, by turns in one process.

The share is that of the rate at which this machine copies memory: of the bytes of all products, codes and scales, over
the time of the whole step, and over that of its products alone.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from loadtest.micro.model_parts import MeasuredStep, prepare
from loadtest.tables import Record
from services.engine.kernels.cpu.isa import known_isa
from services.engine.models.config import DecoderConfig
from services.engine.models.registry import load_weights, open_tensors
from services.engine.models.tensor_source import TensorSource
from services.engine.models.weights import DecoderWeights
from services.engine.quantization.codes import Code, CodedMatrix

STEPS = ((1, 1), (4, 1), (16, 1), (64, 1), (1, 512), (4, 512))  # rows, and new tokens of each
_ROWS = (8, 12, 16, 20, 24, 32, 40, 48, 64, 96)
_COLUMNS, _DEPTH, _GROUP = 3072, 576, 32  # of the products
_LAYERS = 30  # so many weights by turns that none stays in a cache
_TURNS = 15


class Numbers:
    """A source of tensors that has none in codes."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def coded(self, name: str, rows: slice | None = None, columns: slice | None = None) -> None:
        """Returns None: a product reads numbers."""


def measure(model: Path, context: int, dtype: torch.dtype) -> list[Record]:
    """Measures products and steps. context: tokens of each sequence before a step that decodes."""
    config, name = prepare(model, dtype), str(dtype).removeprefix("torch.")
    from loadtest.micro.peaks import copy_rate  # imported late: numba compiles it

    with torch.inference_mode():
        packed, packed_bytes = _load(model, config, dtype, as_numbers=False)
        numbers, number_bytes = _load(model, config, dtype, as_numbers=True)
        copied = copy_rate()
        rates: Record = {
            "of": f"{known_isa().name}, {name}, bytes of products",
            "copied_gb_per_s": copied / 1e9,
            "packed_mb": packed_bytes / 1e6,
            "numbers_mb": number_bytes / 1e6,
        }
        records = [rates, *(_of_rows(rows, dtype) for rows in _ROWS)]
        for rows, new in STEPS:
            own = MeasuredStep(config, packed, rows, new, context)
            other = MeasuredStep(config, numbers, rows, new, context)
            packed_s, number_s = by_turns(own.whole, other.whole)
            record: Record = {
                "of": f"{rows} x {new} tokens",
                "packed_ms": packed_s * 1e3,
                "numbers_ms": number_s * 1e3,
                "times": number_s / packed_s,
            }
            records.append(record)
            if new == 1:
                record |= _shares(packed_bytes, packed_s, number_bytes, number_s, copied)
            if new == 1 and config.experts is None:
                packed_s, number_s = by_turns(own.products, other.products)
                records.append(
                    {
                        "of": f"{rows} x {new} tokens, products alone",
                        "packed_ms": packed_s * 1e3,
                        "numbers_ms": number_s * 1e3,
                        "times": number_s / packed_s,
                        **_shares(packed_bytes, packed_s, number_bytes, number_s, copied),
                    }
                )
        return records


def _shares(packed_bytes: int, packed_s: float, number_bytes: int, number_s: float, copied: float) -> Record:
    return {
        "packed_share": packed_bytes / packed_s / copied,
        "numbers_share": number_bytes / number_s / copied,
    }


def _load(model: Path, config: DecoderConfig, dtype: torch.dtype, *, as_numbers: bool) -> tuple[DecoderWeights, int]:
    """Returns weights, and the bytes of all that a step multiplies: each tensor but an embedding of its own."""
    read: list[int] = []
    with open_tensors(model, config, torch.device("cpu")) as source:
        of_numbers: Any = Numbers(source)
        weights = load_weights(of_numbers if as_numbers else source, config, dtype, fused=True, on_read=read.append)
    assert isinstance(weights, DecoderWeights)
    embedding = 0 if config.tie_word_embeddings else read[0]
    return weights, sum(read) - embedding


def _of_rows(rows: int, dtype: torch.dtype) -> Record:
    """Measures products of some rows with codes of 4 bits as they are, and unpacked."""
    from services.engine.kernels.cpu.coded_linear import FEW_ROWS, CodedLinear

    chance = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (_COLUMNS, _DEPTH), generator=chance, dtype=torch.uint8)
    scales = torch.rand(_COLUMNS, _DEPTH // _GROUP, generator=chance).to(torch.float16)
    layers = [
        CodedLinear([CodedMatrix(Code.UINT4, codes, scales, -8.5 * scales, _GROUP)], None, dtype)
        for _ in range(_LAYERS)
    ]
    x = torch.randn(rows, _DEPTH, generator=chance).to(dtype)

    def run(unpacks: bool) -> None:
        for layer in layers:
            layer(x, gated=True, unpacks=unpacks)

    way = "as they are" if rows <= FEW_ROWS else "unpacked"
    few_s, many_s = by_turns(lambda: run(unpacks=False), lambda: run(unpacks=True))
    return {
        "of": f"{rows} rows, {_LAYERS} products of {_COLUMNS} x {_DEPTH}, {way}",
        "as_they_are_ms": few_s * 1e3,
        "unpacked_ms": many_s * 1e3,
    }


def by_turns(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Returns the shortest time of each: other work of the machine only makes them longer."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_TURNS):
        for run, own in zip((first, second), times, strict=True):
            started = time.perf_counter()
            run()
            own.append(time.perf_counter() - started)
    return min(times[0]), min(times[1])
