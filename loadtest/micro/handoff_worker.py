"""A worker with everything in it but a model.

Its KV has the shape of a small model's, and its steps take time in proportion to their tokens, without a core.
"""

import time

import numpy as np

from kvtransfer.block_memory import HostBlocks
from kvtransfer.layout import KvLayout
from services.config import TransportName, WorkerRole
from services.decode.scheduler import DecodeScheduler
from services.engine.runner.base import StepInput, StepOutput
from services.prefill.scheduler import PrefillScheduler
from services.worker.transports import make_transports
from services.worker.worker import WorkerParts

BLOCK_SIZE = 16
LAYOUT = KvLayout(num_layers=12, num_kv_heads=4, head_dim=64, block_size=BLOCK_SIZE, dtype="bfloat16")  # 192 KiB
VOCABULARY = 8192
MAX_MODEL_LEN = 16_384

NUM_BLOCKS = 2048
_TOKEN_S, _LEAST_STEP_S = 20e-6, 0.001


class _TimedRunner:
    """A `Runner` that computes nothing, for as long as a model would."""

    vocab_size = VOCABULARY
    window: int | None = None
    layout = LAYOUT
    num_blocks = NUM_BLOCKS

    def __init__(self) -> None:
        kv = np.full((NUM_BLOCKS, LAYOUT.block_bytes), 1, dtype=np.uint8)  # in memory, not only asked for
        self._kv = HostBlocks(kv)
        self._num_rows = 0
        self._step_s = 0.0

    def kv_memory(self) -> HostBlocks:
        """See Runner."""
        return self._kv

    def copy_block(self, source: int, destination: int) -> None:
        """See Runner."""

    def launch(self, step: StepInput) -> None:
        """See Runner."""
        self._num_rows = len(step.sample_rows)
        self._step_s = max(_LEAST_STEP_S, len(step.token_ids) * _TOKEN_S)

    def collect(self) -> StepOutput:
        """See Runner."""
        time.sleep(self._step_s)
        return StepOutput(np.arange(self._num_rows, dtype=np.int32), None)


def timed_parts(max_num_batched_tokens: int, role: WorkerRole) -> WorkerParts:
    """What such a worker is made of; its KV moves over NIXL."""
    prefill, decode = PrefillScheduler(max_num_batched_tokens), DecodeScheduler(max_num_batched_tokens)
    return WorkerParts(
        role=role,
        runner=_TimedRunner(),
        scheduler=prefill if role is WorkerRole.PREFILL else decode,
        make_transports=make_transports(TransportName.NIXL),
        fingerprint="micro",
        eos_token_ids=(),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
    )
