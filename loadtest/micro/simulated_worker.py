"""A worker whose model costs nothing: `python -m loadtest.micro.simulated_worker ROLE MODEL PORT STEP_MS SEQS`.

All else in the worker is real: the gateway's stream, the step loop, the prefix cache, handoffs, the index in Redis
(named by BATON_REDIS_URL), TLS (where BATON_MTLS names its certificates). A step takes STEP_MS,
without a core, and has at most SEQS sequences.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from loadtest.micro.idle_runner import IdleRunner
from services.config import MTLS_VARIABLE, REDIS_URL_VARIABLE, LogFormat, TransportName, WorkerRole
from services.engine.runner.base import StepInput, StepOutput
from services.engine.schedulers.base import Scheduler
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.process import lifeline
from services.process.logs import configure_logging
from services.protocol.grpc_options import host_port
from services.protocol.model_files.info import model_digest, read_model_info
from services.protocol.model_files.open import open_model
from services.tls.files import CertificateFiles, CertificatePaths
from services.worker.engine_thread import SWITCH_INTERVAL_S
from services.worker.transports import make_transports
from services.worker.worker import Worker, WorkerParts

_NUM_BLOCKS = 20_000
_MAX_BATCHED_TOKENS = 16_384
_MAX_MODEL_LEN = 8192
_LOWEST_TOKEN_ID = 300  # below are special tokens and single bytes, in most vocabularies


class PacedRunner(IdleRunner):
    """Counts a step's time from its launch, and gives each row another token in each step."""

    def __init__(self, num_blocks: int, vocab_size: int, step_s: float) -> None:
        super().__init__(num_blocks, step_s, vocab_size=vocab_size)
        self._num_rows = 0
        self._ends_at = 0.0
        self._steps = 0

    def launch(self, step: StepInput) -> None:
        """See `Runner.launch`."""
        self._num_rows = len(step.sampled)
        self._ends_at = time.perf_counter() + self.step_s

    def collect(self) -> StepOutput:
        """See `Runner.collect`."""
        time.sleep(max(0.0, self._ends_at - time.perf_counter()))
        self._steps += 1
        rows = np.arange(self._num_rows, dtype=np.int64)
        tokens = (rows * 7919 + self._steps * 104_729) % (self.vocab_size - _LOWEST_TOKEN_ID) + _LOWEST_TOKEN_ID
        return StepOutput(tokens.astype(np.int32), None)


def main(arguments: list[str]) -> None:
    """Serves until a signal ends it, or until the process that started it is gone."""
    lifeline.hold()
    role, model, port, step_ms = WorkerRole(arguments[0]), Path(arguments[1]), int(arguments[2]), float(arguments[3])
    configure_logging(LogFormat.TEXT)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    parts = WorkerParts(
        role=role,
        runner=PacedRunner(_NUM_BLOCKS, read_model_info(open_model(model)).vocab_size, step_ms / 1e3),
        scheduler=_scheduler(role),
        make_transports=make_transports(TransportName.AUTO),
        fingerprint="simulated",
        eos_token_ids=(),
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=int(arguments[4]),
        model=model_digest(open_model(model)),
        redis_url=os.environ.get(REDIS_URL_VARIABLE),
        tls=_certificate(),
    )
    asyncio.run(_serve(Worker(parts), host_port("127.0.0.1", port)))


def _certificate() -> CertificateFiles | None:
    directory = os.environ.get(MTLS_VARIABLE)
    return None if directory is None else CertificateFiles(CertificatePaths.in_directory(Path(directory)))


def _scheduler(role: WorkerRole) -> Scheduler:
    if role is WorkerRole.PREFILL:
        return PrefillScheduler(_MAX_BATCHED_TOKENS)
    return DecodeScheduler(_MAX_BATCHED_TOKENS, prefill_chunk=_MAX_BATCHED_TOKENS)


async def _serve(worker: Worker, address: str) -> None:
    await worker.start(address)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.end)
    await worker.ended
    await worker.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
