"""One frozen configuration per process. The command line (`services/cli.py`) is the only place that makes them."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

REDIS_URL_VARIABLE = "BATON_REDIS_URL"  # in the environment: where --redis-url is not given
GC_DEBUG_VARIABLE = "BATON_GC_DEBUG"  # in the environment: off, on, top=N


class WorkerRole(StrEnum):
    """What a worker's scheduler is for."""

    PREFILL = "prefill"
    DECODE = "decode"


class HandoffMode(StrEnum):
    """When a request is split over a prefill and a decode worker."""

    ALWAYS = "always"  # whenever a pair is there
    NEVER = "never"  # decode workers do it all
    AUTO = "auto"  # when less waiting comes of it, as far as was learned; or by a threshold of uncached prompt tokens


class TransportName(StrEnum):
    """How KV moves between workers."""

    AUTO = "auto"  # for each pair: nixl where gets are one-sided, grpc elsewhere
    NIXL = "nixl"
    GRPC = "grpc"


class LogFormat(StrEnum):
    """How log lines look."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of one engine. None: chosen from the model and the machine."""

    model: Path
    device: str = "cpu"
    dtype: str = "auto"  # "auto" (the checkpoint's own), "float32", "bfloat16", "float16"
    block_size: int = 16
    kv_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    num_threads: int | None = None
    kernels: str = "auto"  # "auto" (fused ones where they can run), "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One prefill or decode worker process."""

    role: WorkerRole
    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 9100
    transport: TransportName = TransportName.AUTO
    allow_plaintext: bool = False
    redis_url: str | None = None  # registry and prefix index
    advertised_host: str | None = None  # in the registry; None: `host`
    log_format: LogFormat = LogFormat.TEXT
    logged_gc_types: int | None = None  # each garbage collection is logged, with so many types; None: it is not


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """One gateway process."""

    model: Path  # its tokenizer, chat template and generation defaults; weights are not read
    served_model_name: str
    workers: tuple[str, ...] = ()  # host:port, all of them; used where there is no Redis
    redis_url: str | None = None  # registry and prefix index
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 9000
    handoff: HandoffMode = HandoffMode.AUTO
    handoff_threshold: int | None = None  # uncached prompt tokens, for HandoffMode.AUTO; None: learned
    request_timeout_s: float = 600.0
    max_waiting: int = 4096  # requests in flight before new ones are refused
    log_format: LogFormat = LogFormat.TEXT
    logged_gc_types: int | None = None  # as a worker's


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """`baton up`: workers and a gateway on this machine."""

    engine: EngineConfig  # of every worker
    demo: bool  # engine.model is the demo model, to be made where it is not there yet
    served_model_name: str
    host: str = "127.0.0.1"  # of the gateway; workers stay on loopback
    port: int = 8000
    grpc_port: int = 9000
    num_prefill: int = 1
    num_decode: int = 1
    redis_url: str | None = None  # None: a server of its own, where the wheel with one is installed
    transport: TransportName = TransportName.AUTO
    handoff: HandoffMode = HandoffMode.AUTO
    handoff_threshold: int | None = None
    request_timeout_s: float = 600.0
    log_format: LogFormat = LogFormat.TEXT
