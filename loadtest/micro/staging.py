"""The host's work for a decode step on a GPU, without launches: cutting attention into work items, and gathering all
arrays of the step in one piece. No GPU takes part.
"""

import time

import numpy as np
import torch

from kvtransfer.layout import KvLayout
from loadtest.tables import Record, spread
from services.engine.attention.base import PagedQueries
from services.engine.attention.triton_attention import TritonAttention, WorkCut
from services.engine.kernels.base import Scoring
from services.engine.runner.gpu.device import HostDevice
from services.engine.runner.gpu.step_buffer import StepBuffer

_LAYOUT = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")  # Llama 3 8B
_HEADS = 32
_MULTIPROCESSORS = 132  # an H200's
_CONTEXT = 4096
_SHARED_BLOCKS = 192
_WARM_UP = 20


def measure(steps: int) -> list[Record]:
    """Returns the microseconds of steps, a record for each batch and shared prefix."""
    records: list[Record] = []
    for batch in (1, 64, 256):
        for shared in (0, _SHARED_BLOCKS) if batch > 1 else (0,):
            taken = _measure(batch, shared, steps)
            records.append(
                {"batch": batch, "context": _CONTEXT, "shared_tokens": shared * 16, **spread(taken, (50, 99))}
            )
    return records


def _measure(batch: int, shared: int, steps: int) -> list[float]:
    buffer = StepBuffer(HostDevice())
    buffer.reserve(16 << 20)
    pool = torch.empty(_LAYOUT.shape(1), dtype=torch.bfloat16)
    attention = TritonAttention(pool, _LAYOUT, _HEADS, Scoring(0.1), staging=buffer, cut=WorkCut(_MULTIPROCESSORS))
    random = np.random.default_rng(0)
    lens = random.integers(_CONTEXT * 7 // 8, _CONTEXT, batch, dtype=np.int32)
    tables = np.arange(batch * (_CONTEXT // 16), dtype=np.int32).reshape(batch, -1)
    tables[:, :shared] = tables[0, :shared]
    queries = PagedQueries(np.arange(batch + 1, dtype=np.int32), lens, tables)
    ids = np.zeros(batch, dtype=np.int32)
    taken = []
    for _ in range(_WARM_UP + steps):
        begin = time.perf_counter()
        buffer.begin()
        buffer.put(ids, fixed=True)
        buffer.put(lens, fixed=True)
        attention.prepare_recorded(queries, batch)
        buffer.copy()
        taken.append((time.perf_counter() - begin) * 1e6)
    return taken[_WARM_UP:]
