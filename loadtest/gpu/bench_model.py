"""A model with random weights behind the runner that workers use, and steps for it."""

import gc
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from loadtest.gpu.shapes import BLOCK_SIZE
from services.engine.models.architectures import num_parameters, parse_model_config
from services.engine.models.base import Weights
from services.engine.models.kv_scales import unit_scales
from services.engine.models.makers import Makers
from services.engine.models.model_config import ModelConfig
from services.engine.models.registry import load_weights, open_tensors
from services.engine.runner.base import SamplingBatch, StepInput, StepTokens, spare_blocks
from services.engine.runner.gpu.device import Device
from services.engine.runner.gpu.experts import stacked_experts
from services.engine.runner.gpu.gpu_runner import GpuRunner, StepLimits
from services.engine.runner.load_plan import kv_layout

FP8 = torch.float8_e4m3fn
_FILLED_AT_ONCE = 1 << 28  # elements of a pool
_WARM_UP = 3
_TOKENS = 256  # ids below are in every vocabulary


@dataclass(frozen=True, slots=True, eq=False)
class BenchModel:
    """Weights on a device, without KV."""

    name: str
    config: ModelConfig
    weights: Weights
    dtype: torch.dtype
    device: Device

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads: all weights but an embedding that is not the output layer as well."""
        unread = 0 if self.config.tie_word_embeddings else self.config.vocab_size * self.config.hidden_size
        return int((num_parameters(self.config) - unread) * self.dtype.itemsize)

    def layout(self, kv_dtype: torch.dtype | None = None) -> KvLayout:
        """Returns the layout of KV in the model's dtype, or in another."""
        return kv_layout(self.config, BLOCK_SIZE, kv_dtype or self.dtype)

    def runner(self, num_blocks: int, limits: StepLimits, kv_dtype: torch.dtype | None = None) -> GpuRunner:
        """Makes a runner over a pool full of random numbers: zeros take less power, and so less time."""
        free_memory(self.device.torch)
        layout = self.layout(kv_dtype)
        num_all = spare_blocks(num_blocks, BLOCK_SIZE).stop
        pool = torch.empty(num_all, layout.block_bytes, dtype=torch.uint8, device=self.device.torch)
        _randomize(pool.view(-1).view(kv_dtype or self.dtype))
        scales = unit_scales(self.config) if kv_dtype == FP8 else None
        return GpuRunner(
            self.config,
            self.weights,
            pool,
            layout,
            self.device,
            limits,
            kv_scales=scales,
        )


def free_memory(device: torch.device) -> None:
    """Frees memory that nobody uses any more. Pools take most of a card: the next one finds no room beside the last."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def load(name: str, raw: dict[str, Any], device: Device) -> BenchModel:
    """Makes the random weights of a model."""
    config = parse_model_config(raw)
    dtype = getattr(torch, raw["torch_dtype"])
    with torch.inference_mode(), open_tensors(None, config, device.torch) as source:
        return BenchModel(
            name, config, load_weights(source, config, dtype, makers=Makers(experts=stacked_experts)), dtype, device
        )


def decode_step(batch: int, context: int, shared: int = 0) -> StepInput:
    """Makes a step of `batch` rows that each compute token number `context`. All share their first `shared` blocks."""
    per_row = -(-context // BLOCK_SIZE)
    own = shared + np.arange(batch * (per_row - shared)).reshape(batch, -1)
    tables = np.concatenate([np.tile(np.arange(shared), (batch, 1)), own], axis=1).astype(np.int32)
    lens = np.full(batch, context, dtype=np.int32)
    return _step(np.ones(batch, dtype=np.int32), lens, tables)


def prefill_step(num_tokens: int) -> StepInput:
    """Makes a step that computes a whole prompt."""
    length = np.array([num_tokens], dtype=np.int32)
    return _step(length, length, np.arange(-(-num_tokens // BLOCK_SIZE), dtype=np.int32)[None])


class StepTime(NamedTuple):
    """Seconds of one of several steps, each launched while the one before runs."""

    wall: float
    cpu: float  # of the thread that launches and collects the step: the host's work, and busy waiting


def steady(runner: GpuRunner, step: StepInput, rounds: int) -> StepTime:
    """Measures the mean of `rounds` steps, after some that do not count."""
    _run(runner, step, _WARM_UP)
    wall, cpu = time.perf_counter(), time.thread_time()
    _run(runner, step, rounds)
    return StepTime((time.perf_counter() - wall) / rounds, (time.thread_time() - cpu) / rounds)


def _run(runner: GpuRunner, step: StepInput, rounds: int) -> None:
    runner.launch(step)
    for _ in range(rounds - 1):
        runner.launch(step)
        runner.collect()
    runner.collect()


def _step(counts: np.ndarray, lens: np.ndarray, tables: np.ndarray) -> StepInput:
    num_rows, starts = len(counts), np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(lens - counts - starts[:-1], counts)
    random = np.random.default_rng(0)
    tokens = StepTokens(
        token_ids=random.integers(0, _TOKENS, int(starts[-1]), dtype=np.int32),
        positions=positions.astype(np.int32),
        query_starts=starts,
        seq_lens=lens,
        block_tables=tables,
    )
    return StepInput.of(tokens, starts[1:].astype(np.int64) - 1, SamplingBatch.greedy(num_rows))


def _randomize(flat: Tensor) -> None:
    for piece in flat.split(_FILLED_AT_ONCE):
        piece.copy_(torch.randn(piece.shape, dtype=torch.bfloat16, device=piece.device))
