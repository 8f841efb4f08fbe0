"""One frozen configuration per process. The command line (`services/cli.py`) is the only place that makes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

REDIS_URL_VARIABLE = "BATON_REDIS_URL"  # in the environment: where --redis-url is not given
GC_DEBUG_VARIABLE = "BATON_GC_DEBUG"  # in the environment: off, on, top=N
CPU_ISA_VARIABLE = "BATON_CPU_ISA"  # in the environment: auto, or a class of processors (`kernels/cpu/isa.py`)


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


class Device(StrEnum):
    """Where a model runs."""

    AUTO = "auto"  # on a GPU where torch sees one
    CPU = "cpu"
    CUDA = "cuda"


class LoadFormat(StrEnum):
    """Where a model's weights come from."""

    AUTO = "auto"  # the checkpoint
    DUMMY = "dummy"  # random ones; config.json alone is read


class Quantization(StrEnum):
    """What the weights of linear layers are made into when they are loaded."""

    NONE = "none"
    FP8 = "fp8"  # e4m3 with a scale for each output channel; activations get theirs as they come


class KvCacheDtype(StrEnum):
    """What KV is stored in."""

    AUTO = "auto"  # the model's dtype
    FP8 = "fp8"  # e4m3


DEFAULT_GPU_MEMORY_FRACTION = 0.9
SPLIT_KEYS_MULTIPLE = 128  # of `EngineConfig.split_keys`


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of one engine. None: chosen from the model and the machine."""

    model: Path  # a Hugging Face directory or a GGUF file
    device: Device = Device.CPU
    dtype: str = "auto"  # "auto" (the checkpoint's own), "float32", "bfloat16", "float16"
    block_size: int = 16
    kv_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    num_threads: int | None = None
    kernels: str = "auto"  # "auto" (fused ones where they can run), "torch"; on the CPU
    load_format: LoadFormat = LoadFormat.AUTO
    # On a GPU alone:
    quantization: Quantization = Quantization.NONE
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    gpu_memory_fraction: float | None = None  # of a GPU's memory, for all workers on it; None: the default
    split_keys: int | None = None  # that attention reads in one piece; None: as it is fastest for a batch
    # Of the workers that one `baton up` started: the machine's GPUs are dealt out among them.
    worker_index: int = 0
    num_workers: int = 1

    @property
    def gpu_options(self) -> tuple[str, ...]:
        """Options that were named and mean something on a GPU alone, as they are on the command line."""
        named = {
            f"--quantization {self.quantization}": self.quantization != Quantization.NONE,
            f"--kv-cache-dtype {self.kv_cache_dtype}": self.kv_cache_dtype != KvCacheDtype.AUTO,
            f"--gpu-memory-fraction {self.gpu_memory_fraction}": self.gpu_memory_fraction is not None,
            f"--attention-split-keys {self.split_keys}": self.split_keys is not None,
        }
        return tuple(option for option, is_named in named.items() if is_named)


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
    # Sampling values that hold instead of those of the model's generation_config.json.
    generation_overrides: Mapping[str, float] = field(default_factory=dict)
    request_timeout_s: float = 600.0
    max_waiting: int = 4096  # requests in flight before new ones are refused
    log_format: LogFormat = LogFormat.TEXT
    logged_gc_types: int | None = None  # as a worker's


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """`baton up`: workers and a gateway on this machine."""

    engine: EngineConfig  # of every worker
    served_model_name: str
    model_note: str = ""  # for a person, beside the model's name
    makes_model: bool = False  # engine.model is the random model, to be made where it is not there yet
    host: str = "127.0.0.1"  # of the gateway; workers stay on loopback
    port: int = 8000
    grpc_port: int = 9000
    num_prefill: int = 1
    num_decode: int = 1
    redis_url: str | None = None  # None: a server of its own, where the wheel with one is installed
    transport: TransportName = TransportName.AUTO
    handoff: HandoffMode = HandoffMode.AUTO
    handoff_threshold: int | None = None
    generation_overrides: Mapping[str, float] = field(default_factory=dict)  # as a gateway's
    request_timeout_s: float = 600.0
    log_format: LogFormat = LogFormat.TEXT
