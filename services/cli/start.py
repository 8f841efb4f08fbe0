"""The start of a gateway or a worker, whose code is imported when it is to run: `baton gateway` never loads torch."""

from services.config import WorkerRole
from services.process import child_config
from services.process.configs import GatewayConfig, WorkerConfig


def run_gateway(config: GatewayConfig) -> int:
    """Runs a gateway; returns the exit code."""
    from services.gateway.main import run

    return run(config)


def run_worker(config: WorkerConfig) -> int:
    """Runs a worker, or its rank on this host; returns the exit code."""
    from services.engine.kernels.cpu.openmp import load_openmp

    load_openmp()
    if config.hosts.is_led:
        from services.worker.rank_on_host import run_rank

        return run_rank(config)
    if config.role is WorkerRole.PREFILL:
        from services.prefill.main import run
    else:
        from services.decode.main import run
    return run(config)


def run_child(command: str) -> int:
    """Runs the gateway or the worker whose configuration is the parent's; returns the exit code."""
    if command == "gateway":
        return run_gateway(child_config.take(GatewayConfig))
    return run_worker(child_config.take(WorkerConfig))
