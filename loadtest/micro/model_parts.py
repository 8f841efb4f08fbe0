"""The parts of a forward pass, each over all layers and by itself: what a worker runs, without its step loop.

The limit of a part is the longer of two: the bytes that it has to read at the rate at which this machine reads memory,
and its products at the rate at which it multiplies large bfloat16 matrices. Both rates are measured first.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from loadtest.micro.rows import Row
from services.engine.attention.base import PagedQueries
from services.engine.attention.cpu_attention import CpuAttention, CpuPlan
from services.engine.kernels.load import make_operations, why_not_fused
from services.engine.models.config import DecoderConfig
from services.engine.models.decoder import Decoder
from services.engine.models.linear import Linear
from services.engine.models.registry import load_weights, open_tensors, parse_model_config
from services.engine.models.rope import inverse_frequencies, rotation
from services.engine.models.weights import DecoderWeights
from services.engine.openmp import loaded_openmp
from services.engine.runner.load_plan import kv_layout
from services.engine.runner.memory import allocate, keep_freed_memory
from services.protocol.model_files.open import open_model

_BATCHES = (1, 64)
_BLOCK_SIZE = 16
_SECONDS, _LEAST_RUNS = 0.6, 10  # of each part
_READ_BYTES, _MATRIX = 1 << 30, 2048


def measure(model: Path, context: int) -> list[Row]:
    """context: tokens of each sequence before the step."""
    keep_freed_memory()
    openmp = loaded_openmp()
    if openmp is not None:
        openmp.set_num_threads(len(os.sched_getaffinity(0)))
        openmp.spin()
    config = parse_model_config(open_model(model).config())
    if not isinstance(config, DecoderConfig):
        raise SystemExit(f"{config.architecture} is not taken apart here")
    with torch.inference_mode():
        with open_tensors(model, config, torch.device("cpu")) as checkpoint:
            weights = load_weights(checkpoint, config, torch.bfloat16, fused=why_not_fused("bfloat16") is None)
        assert isinstance(weights, DecoderWeights)
        read, multiplied = _read_rate(), _matrix_rate()
        rates: Row = {"part": "rates of the machine", "read_gb_per_s": read / 1e9, "bf16_tflops": multiplied / 1e12}
        return [
            rates,
            *(row for batch in _BATCHES for row in _of_batch(config, weights, batch, context, read, multiplied)),
        ]


def _of_batch(
    config: DecoderConfig, weights: DecoderWeights, batch: int, context: int, read: float, multiplied: float
) -> list[Row]:
    step = _Step(config, weights, batch, context)
    linear_bytes = 2 * sum(
        out * depth
        for out, depth in (
            ((config.num_heads + 2 * config.num_kv_heads) * config.head_dim, config.hidden_size),
            (config.hidden_size, config.num_heads * config.head_dim),
            (2 * config.intermediate_size, config.hidden_size),
            (config.hidden_size, config.intermediate_size),
        )
    )
    head_bytes = 2 * config.vocab_size * config.hidden_size
    kv_bytes = batch * (context + 1) * 2 * config.num_kv_heads * config.head_dim * 2 * config.num_layers
    parts: list[tuple[str, Callable[[], object], float]] = [
        ("index work", step.prepare, 0.0),
        ("linear layers", step.linears, max(1 / read, batch / multiplied) * linear_bytes * config.num_layers),
        ("attention", step.attention, kv_bytes / read),
        ("norms, rotation, KV write", step.small, 0.0),
        ("output layer", step.head, max(1 / read, batch / multiplied) * head_bytes),
        ("whole forward pass", step.whole, 0.0),
    ]
    rows: list[Row] = []
    total_limit = 0.0
    for name, run, limit_s in parts:
        total_limit += limit_s
        limit = total_limit if run == step.whole else limit_s
        row: Row = {"batch": batch, "part": name, "ms": _median_s(run) * 1e3}
        rows.append(row | ({"limit_ms": limit * 1e3} if limit else {}))
    return rows


class _Step:
    """One decode step of `batch` sequences of `context` tokens, whole and in parts."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, batch: int, context: int) -> None:
        self._config, self._weights = config, weights
        layout = kv_layout(config, _BLOCK_SIZE, weights.dtype)
        width = context // _BLOCK_SIZE + 1
        num_blocks = batch * width + 1
        pool = torch.from_numpy(allocate(num_blocks * layout.block_bytes)).view(weights.dtype)
        pool.fill_(0.5)  # memory that was never written is one page of zeros, which is always in a cache
        fused = why_not_fused(layout.dtype) is None
        self._attention = CpuAttention(
            pool.view(layout.shape(num_blocks)), layout, config.num_heads, config.scale, fused=fused
        )
        self._operations = make_operations(layout.dtype, fused=fused)
        self._model = Decoder(config, weights, self._attention, self._operations)
        self._queries = PagedQueries(
            np.arange(batch + 1, dtype=np.int32),
            np.full(batch, context + 1, dtype=np.int32),
            np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32)).reshape(batch, width),
        )
        self._ids = torch.randint(config.vocab_size, (batch,))
        self._positions = torch.full((batch,), context, dtype=torch.int32)
        assert config.rope is not None
        self._turn = rotation(inverse_frequencies(config.rope, config.head_dim), self._positions, weights.dtype)
        self._x, self._fed = self._random(config.hidden_size), self._random(config.intermediate_size)
        heads = config.num_heads + 2 * config.num_kv_heads
        self._heads = self._random(heads * config.head_dim).unflatten(1, (heads, config.head_dim))
        self._attended = self._random(config.num_heads * config.head_dim)
        self._plan = self.prepare()

    def _random(self, width: int) -> Tensor:
        return torch.randn(len(self._ids), width).to(self._weights.dtype)

    def prepare(self) -> CpuPlan:
        return self._attention.prepare(self._queries, self._config.window)

    def linears(self) -> None:
        for layer in self._weights.layers:
            layer.qkv(self._x)
            layer.output(self._attended)
            layer.gate_up.gated(self._x, self._operations.silu_mul)
            layer.down(self._fed)

    def attention(self) -> None:
        q, k, v = self._split()
        for layer in range(self._config.num_layers):
            self._attention.attend(self._plan, layer, q, k, v)

    def small(self) -> None:
        config = self._config
        _, k, v = self._split()
        for index, layer in enumerate(self._weights.layers):
            rotated = self._heads[:, : config.num_heads + config.num_kv_heads]
            self._operations.rotate(rotated, *self._turn, layer.qk_norm, config.rms_norm_eps)
            self._attention.write(self._plan, index, k, v)
            self._operations.add_norm(self._x, self._x, layer.mlp_norm, config.rms_norm_eps)
            self._operations.add_norm(self._x, self._x, layer.input_norm, config.rms_norm_eps)
            self._x.fill_(0.5)

    def head(self) -> None:
        self._model.logits(self._x)

    def whole(self) -> None:
        self._model.all_logits(self._ids, self._positions, self.prepare())

    def _split(self) -> list[Tensor]:
        config = self._config
        return list(self._heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1))


def _median_s(run: Callable[[], object]) -> float:
    run()
    times: list[float] = []
    while len(times) < _LEAST_RUNS or sum(times) < _SECONDS:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def _read_rate() -> float:
    """Bytes a second that all threads read of memory that no cache holds."""
    memory = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / _median_s(memory.sum)


def _matrix_rate() -> float:
    """bfloat16 operations a second of a large product with a packed weight, by oneDNN."""
    x, linear = _random_matrix(), Linear(_random_matrix(), None)
    return 2.0 * _MATRIX**3 / _median_s(lambda: linear(x))


def _random_matrix() -> Tensor:
    return torch.randn(_MATRIX, _MATRIX).to(torch.bfloat16)
