"""Compiles every kernel that later parts use, by running a step of each kind once.

Later processes find them in Triton's cache (`TRITON_CACHE_DIR`).
"""

import time
from collections.abc import Iterator

import torch

from loadtest.gpu.bench_model import BenchModel
from loadtest.gpu.shapes import BLOCK_SIZE
from loadtest.tables import Record
from services.engine.runner.gpu.gpu_runner import StepLimits

_BATCH, _TOKENS = 8, 512


def measure(
    model: BenchModel, kv_dtype: torch.dtype, batch: int = _BATCH, num_tokens: int = _TOKENS
) -> Iterator[Record]:
    """Yields the seconds. Kernels depend on the model's shape and the dtype of KV, not on batch or context."""
    limits = StepLimits(max_num_seqs=batch, max_num_batched_tokens=num_tokens, max_model_len=num_tokens)
    began = time.perf_counter()
    model.runner(num_tokens // BLOCK_SIZE, limits, kv_dtype).warm_up()
    seconds = time.perf_counter() - began
    yield {"model": model.name, "kv": str(kv_dtype).removeprefix("torch."), "seconds": seconds}
