"""The measurement of `kv`: pools of each kind, and decode attention over them."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvtransfer.layout import KvLayout
from loadtest.cannot_run import CannotRun
from loadtest.tables import Record
from services.engine.attention.base import PagedQueries
from services.engine.attention.cpu_attention import CpuAttention
from services.engine.kernels.base import CodedKv, Scoring
from services.engine.kernels.cpu.huge_pages import allocate
from services.engine.kernels.cpu.isa import known_isa
from services.engine.kernels.cpu.openmp import loaded_openmp
from services.engine.kernels.load import why_not_fused

_BLOCK_SIZE = 16
_SECONDS, _LEAST_RUNS = 0.5, 5  # of each kind in each round
_STORED = {"bfloat16": ("bfloat16", False), "int8": ("int8", True), "fp8": ("float8_e4m3fn", True)}


@dataclass(frozen=True, slots=True)
class Shape:
    """A decode step: sequences of so many tokens, and the heads of a model in bfloat16."""

    rows: int
    tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    group: int  # query heads of a KV head


def measure(shape: Shape, rounds: int) -> list[Record]:
    """Measures each kind once in each round. Raises CannotRun where there are no kernels."""
    if reason := why_not_fused("bfloat16"):
        raise CannotRun(f"no kernels run here: {reason}")
    openmp = loaded_openmp()
    if openmp is not None:
        openmp.set_num_threads(len(os.sched_getaffinity(0)))
        openmp.spin()
    with torch.inference_mode():
        steps = {name: _Step(shape, *stored) for name, stored in _STORED.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                times[name].append(_median_s(step.run))
    plain = np.array(times["bfloat16"])
    return [
        {
            "kv": f"{name}, {known_isa().name}",
            "token_bytes": steps[name].token_bytes,
            "read_mb": steps[name].read_bytes / 1e6,
            "ms": float(np.median(took)) * 1e3,
            "fastest_ms": min(took) * 1e3,
            "slowest_ms": max(took) * 1e3,
            "times_sooner": float(np.median(plain / np.array(took))),
        }
        for name, took in times.items()
    ]


class _Step:
    """Attention of all layers over a pool of its own, whose blocks lie in no order."""

    def __init__(self, shape: Shape, dtype: str, token_scales: bool) -> None:
        layout = KvLayout(shape.layers, shape.kv_heads, shape.head_dim, _BLOCK_SIZE, dtype, token_scales=token_scales)
        width = -(-shape.tokens // _BLOCK_SIZE)
        num_blocks = shape.rows * width + 1
        raw = torch.from_numpy(allocate(num_blocks * layout.block_bytes))
        coded = CodedKv(torch.bfloat16) if token_scales else None
        pool = (raw if token_scales else raw.view(torch.bfloat16)).view(layout.shape(num_blocks))
        num_heads = shape.kv_heads * shape.group
        scoring = Scoring(shape.head_dim**-0.5)
        self._attention = CpuAttention(pool, layout, num_heads, scoring, coded, fused=True)
        lengths, starts = np.full(shape.rows, shape.tokens, np.int32), np.arange(shape.rows + 1, dtype=np.int32)
        tables = np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32))
        tables = tables.reshape(shape.rows, width)
        self._write(PagedQueries(starts * np.int32(shape.tokens), lengths, tables), shape)
        self._plan = self._attention.prepare(PagedQueries(starts, lengths, tables))
        self._layers = shape.layers
        self._q = torch.randn(shape.rows, num_heads, shape.head_dim).to(torch.bfloat16)
        self.token_bytes = layout.token_bytes
        self.read_bytes = shape.rows * shape.tokens * layout.token_bytes

    def _write(self, queries: PagedQueries, shape: Shape) -> None:
        """Fills the pool: memory that was never written is one page of zeros, which is always in a cache."""
        plan = self._attention.prepare(queries)
        new = torch.randn(2, shape.rows * shape.tokens, shape.kv_heads, shape.head_dim).to(torch.bfloat16)
        for layer in range(shape.layers):
            self._attention.write(plan, layer, new[0], new[1])

    def run(self) -> None:
        """Runs attention of all layers."""
        for layer in range(self._layers):
            self._attention.attend(self._plan, layer, self._q, self._q, self._q)


def _median_s(run: Callable[[], None]) -> float:
    run()
    times: list[float] = []
    while len(times) < _LEAST_RUNS or sum(times) < _SECONDS:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return float(np.median(times))
