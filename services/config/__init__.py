"""Options and configurations: the choices that options have, and the names of variables in the environment.

`option.py` says what an option is, `engine.py` has those of an engine. The configuration of each process is in
`services/process/configs.py`. The command line (`services/cli`) and the launcher are all that make one.
"""

from enum import StrEnum

API_KEY_VARIABLE = "BATON_API_KEY"  # in the environment: where --api-key is not given
KEYS_VARIABLE = "BATON_KEYS"  # in the environment: where --keys is not given
REDIS_URL_VARIABLE = "BATON_REDIS_URL"  # in the environment: where --redis-url is not given
MTLS_VARIABLE = "BATON_MTLS"  # in the environment: where --mtls is not given
GC_DEBUG_VARIABLE = "BATON_GC_DEBUG"  # in the environment: off, on, top=N
CPU_ISA_VARIABLE = "BATON_CPU_ISA"  # in the environment: auto, or a class of processors (`kernels/cpu/isa.py`)


class Right(StrEnum):
    """A part of the gateway that a client's key opens."""

    API = "api"  # all that clients ask for
    ADMIN = "admin"  # /debug and the console at the admin port; all of the console at the API's


class WorkerRole(StrEnum):
    """The half of the work that a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class HandoffMode(StrEnum):
    """The rule by which a gateway splits a request over a prefill and a decode worker."""

    ALWAYS = "always"  # whenever a pair is there
    NEVER = "never"  # decode workers do it all
    AUTO = (
        "auto"  # where requests wait less for it, as the gateway learned; or by a threshold of uncached prompt tokens
    )


class TransportName(StrEnum):
    """The way in which KV moves between workers."""

    AUTO = "auto"  # for each pair: nixl where gets are one-sided, grpc elsewhere
    NIXL = "nixl"
    GRPC = "grpc"


class ToolParser(StrEnum):
    """The form in which a model writes calls of tools."""

    AUTO = "auto"  # found from the model's files
    NONE = "none"  # calls are not told apart
    DEEPSEEK_V3 = "deepseek-v3"
    DEEPSEEK_V31 = "deepseek-v31"
    FUNCTOOLS = "functools"
    GRANITE = "granite"
    HARMONY = "harmony"  # in channels, with the reasoning
    HERMES = "hermes"
    LLAMA3_JSON = "llama3-json"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral-args"
    PHI4_MINI = "phi4-mini"
    PYTHONIC = "pythonic"
    QWEN3_CODER = "qwen3-coder"


class ReasoningParser(StrEnum):
    """The form in which a model writes its reasoning."""

    AUTO = "auto"  # found from the model's files
    NONE = "none"  # reasoning is not told apart
    GRANITE = "granite"
    HARMONY = "harmony"  # in channels, with the calls
    THINK = "think"
    MISTRAL_THINK = "mistral-think"


class Pooling(StrEnum):
    """The way from the hidden states of a prompt's tokens to one embedding."""

    LAST = "last"  # the last token's
    MEAN = "mean"  # the mean of all
    CLS = "cls"  # the first token's


class LogFormat(StrEnum):
    """The form of log lines."""

    TEXT = "text"
    JSON = "json"


class DeviceKind(StrEnum):
    """The kind of device that a model runs on."""

    AUTO = "auto"  # on a GPU where torch sees one
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """The type of the numbers that a model computes in."""

    AUTO = "auto"  # the checkpoint's own
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Kernels(StrEnum):
    """The code that computes attention and the small operations on a CPU."""

    AUTO = "auto"  # fused kernels where they can run
    TORCH = "torch"


class LoadFormat(StrEnum):
    """The source of a model's weights."""

    AUTO = "auto"  # the checkpoint
    DUMMY = "dummy"  # random ones; config.json alone is read


class ShareWeights(StrEnum):
    """The weights of workers of one host: one copy in memory, or one for each."""

    AUTO = "auto"  # where that makes no step slower
    ON = "on"
    OFF = "off"


class Quantization(StrEnum):
    """The form that the weights of linear layers get when they are loaded."""

    NONE = "none"
    FP8 = "fp8"  # e4m3 with a scale for each output channel; activations get theirs as they come
    INT8 = "int8"  # with a scale for each output channel; activations get theirs as they come
    INT4 = "int4"  # with a scale and an offset for 32 numbers


class KvCacheDtype(StrEnum):
    """The type of the numbers in which KV is stored."""

    AUTO = "auto"  # the model's dtype
    FP8 = "fp8"  # e4m3
    INT8 = "int8"  # on a CPU
