"""Two workers with their real runner on one device, for the parts that need processes."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from kvtransfer.layout import KvLayout
from loadtest.gpu.shapes import BLOCK_SIZE, LLAMA_3_8B
from loadtest.micro.worker_pair import WorkerPair, worker_pair
from loadtest.tables import Record
from services.config import DeviceKind, Kernels, LoadFormat, TransportName, WorkerRole
from services.config.engine import EngineConfig
from services.engine.models.architectures import parse_model_config
from services.engine.runner.load import load_runner
from services.engine.runner.load_plan import kv_layout
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.worker.engine_thread import no_pause
from services.worker.transports import make_transports
from services.worker.worker import WorkerParts


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSetup:
    """The set-up of both workers, with equal random weights. The size of the KV pools is fixed: two workers that start
    on one card at the same time would take shares of its memory by chance.
    """

    name: str = "Llama-3-8B"
    shape: dict[str, Any] = field(default_factory=lambda: LLAMA_3_8B)  # config.json
    device: DeviceKind = DeviceKind.CUDA
    kernels: Kernels = Kernels.AUTO  # on the CPU
    num_threads: int | None = None  # on the CPU
    kv_memory_bytes: int = 24 << 30  # of each worker
    max_model_len: int = 17_408
    max_num_seqs: int = 16
    prefill_tokens: int = 8192  # in a step
    decode_tokens: int = 8192  # in a step, where decode computes prompts

    @property
    def layout(self) -> KvLayout:
        """The layout of both KV pools."""
        dtype: torch.dtype = getattr(torch, self.shape["torch_dtype"])
        return kv_layout(parse_model_config(self.shape), BLOCK_SIZE, dtype)

    def prompt(self, random: np.random.Generator, num_tokens: int) -> np.ndarray:
        """Makes a prompt of random tokens: no two prompts share a block."""
        return random.integers(0, self.shape["vocab_size"], num_tokens, dtype=np.int32)


@asynccontextmanager
async def pair_of(setup: PairSetup) -> AsyncIterator[WorkerPair]:
    """Starts the workers, and ends them. Raises StartError."""
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(setup.shape))
        async with worker_pair(partial(_make_parts, setup, Path(directory))) as pair:
            yield pair


def in_turn(records: AsyncIterator[Record]) -> Iterator[Record]:
    """Yields records as they are measured, on an event loop that runs until the last one."""

    async def following() -> Record | None:
        return await anext(records, None)

    with asyncio.Runner() as runner:
        while (record := runner.run(following())) is not None:
            yield record


def _make_parts(setup: PairSetup, directory: Path, role: WorkerRole) -> WorkerParts:
    """Makes the parts of a worker, in its process."""
    is_prefill = role is WorkerRole.PREFILL
    num_tokens = setup.prefill_tokens if is_prefill else setup.decode_tokens
    loaded = load_runner(
        EngineConfig(
            model=directory,
            device=setup.device,
            load_format=LoadFormat.DUMMY,
            kernels=setup.kernels,
            num_threads=setup.num_threads,
            kv_memory_bytes=setup.kv_memory_bytes,
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=num_tokens,
            block_size=BLOCK_SIZE,
        )
    )
    return WorkerParts(
        role=role,
        runner=loaded.runner,
        scheduler=PrefillScheduler(num_tokens) if is_prefill else DecodeScheduler(num_tokens),
        make_transports=make_transports(TransportName.AUTO),
        fingerprint=loaded.fingerprint,
        eos_token_ids=loaded.eos_token_ids,
        max_model_len=loaded.max_model_len,
        max_num_seqs=setup.max_num_seqs,
        pipeline_depth=loaded.pipeline_depth,
        decode_pause_s=no_pause if loaded.cores is None else loaded.cores.decode_pause_s,
    )
