"""The decode worker's entry point."""

from services.engine.schedulers.decode import DecodeScheduler
from services.process.configs import WorkerConfig
from services.worker.main import run_worker


def run(config: WorkerConfig) -> int:
    """Serves until told to end; returns the exit code."""
    return run_worker(config, DecodeScheduler(config.workers.engine.max_num_batched_tokens))
