"""The configuration of one engine, with its options: those that `baton up`, `baton prefill` and `baton decode` have."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from services.config import (
    CPU_ISA_VARIABLE,
    DeviceKind,
    Dtype,
    Kernels,
    KvCacheDtype,
    LoadFormat,
    Quantization,
    ShareWeights,
)
from services.config.option import Option, OptionError, options_of

DEFAULT_GPU_MEMORY_FRACTION = 0.9
SPLIT_KEYS_MULTIPLE = 128  # of `EngineConfig.split_keys`

_ENGINE, _GPU = "Engine, of each worker", "Engine, on a GPU alone"  # panels of the help text
_MEMORY_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_memory(text: str) -> int:
    """Bytes of `512MiB`, `4GiB`, `1.5gb` or a plain number of bytes. Raises OptionError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _MEMORY_UNITS:
        raise OptionError(f"{text!r} is no amount of memory; write 512MiB, 4GiB or a number of bytes")
    return int(float(match[1]) * _MEMORY_UNITS[match[2]])


def parse_fraction(text: str) -> float:
    """A number above 0 and at most 1. Raises OptionError."""
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise OptionError(f"{text!r} is no fraction; write a number above 0 and at most 1")
    return fraction


def parse_split_keys(text: str) -> int:
    """A multiple of the number of keys that kernels read at once. Raises OptionError."""
    keys = int(text) if text.strip().isdecimal() else 0
    if keys < 1 or keys % SPLIT_KEYS_MULTIPLE:
        raise OptionError(f"{text!r} is no multiple of {SPLIT_KEYS_MULTIPLE}")
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """A model, and the limits of the engine that runs it. None: chosen from the model and the machine."""

    model: Path  # a Hugging Face directory or a GGUF file
    device: Annotated[
        DeviceKind,
        Option(panel=_ENGINE, help="Where the model runs. auto: on a GPU where torch sees one, else on the CPU."),
    ] = DeviceKind.CPU
    dtype: Annotated[
        Dtype,
        Option(panel=_ENGINE, help="What the model computes in; auto: the checkpoint's own, bfloat16 for a GGUF file."),
    ] = Dtype.AUTO
    load_format: Annotated[
        LoadFormat,
        Option(
            panel=_ENGINE,
            help="auto: the checkpoint's weights. dummy: random ones, and of the model only config.json and "
            "tokenizer are read.",
        ),
    ] = LoadFormat.AUTO
    max_model_len: Annotated[
        int | None,
        Option(panel=_ENGINE, min=1, help="Longest sequence, prompt included. Default: the model's own, if it fits."),
    ] = None
    max_num_seqs: Annotated[int, Option(panel=_ENGINE, min=1, help="Sequences in one step, at most.")] = 256
    max_num_batched_tokens: Annotated[
        int, Option(panel=_ENGINE, min=1, help="Tokens in one step; longer prompts run in chunks.")
    ] = 2048
    block_size: Annotated[int, Option(panel=_ENGINE, min=1, help="Token positions in one KV block.")] = 16
    kv_memory_bytes: Annotated[
        int | None,
        Option(
            flag="--kv-memory",
            panel=_ENGINE,
            parse=parse_memory,
            metavar="SIZE",
            help="KV memory of each worker: 512MiB, 4GiB. Default: a quarter of the free memory, at most 4GiB; "
            "on a GPU what --gpu-memory-fraction leaves.",
        ),
    ] = None
    num_threads: Annotated[
        int | None,
        Option(
            panel=_ENGINE,
            min=1,
            help="CPU threads of each worker. Default: all cores, shared by those that step.",
        ),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        Option(
            panel=_ENGINE,
            min=1,
            metavar="N",
            help="Processes (ranks) that each worker consists of, on the CPU: each has a part of the attention heads, "
            "of the MLPs and of the vocabulary, and of the worker's cores.",
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Option(
            panel=_ENGINE,
            min=1,
            metavar="N",
            help="Stages of a prefill worker, on the CPU: each has a part of the layers, in as many processes as "
            "--tensor-parallel-size says, and works on another piece of a prompt.",
        ),
    ] = 1
    expert_parallel: Annotated[
        bool,
        Option(
            panel=_ENGINE,
            help="Each rank has some whole experts. Default: a part of the columns of all of them.",
        ),
    ] = False
    kernels: Annotated[
        Kernels,
        Option(
            panel=_ENGINE,
            help="On the CPU. auto: kernels that numba compiles for the processor's class, or for the lower one that "
            f"{CPU_ISA_VARIABLE} in the environment names (amx, avx512_bf16, avx512, avx2), where they can run. torch: "
            "its own operations alone.",
        ),
    ] = Kernels.AUTO
    share_weights: Annotated[
        ShareWeights,
        Option(
            panel=_ENGINE,
            help="On the CPU, where kernels compute. auto: workers of one user on one host that have the same weights "
            "read one copy in memory, where shared memory can be in huge pages. on: elsewhere too, where steps take "
            "longer. off: each has its own.",
        ),
    ] = ShareWeights.AUTO
    kv_cache_dtype: Annotated[
        KvCacheDtype,
        Option(
            panel=_ENGINE,
            help="auto: KV is stored as the model computes. fp8: e4m3, with the checkpoint's scales, else on a CPU "
            "with one for each token and head, on a GPU with 1. int8, on a CPU: with a scale for each token and head.",
        ),
    ] = KvCacheDtype.AUTO
    quantization: Annotated[
        Quantization,
        Option(
            panel=_ENGINE,
            help="Weights of linear layers are quantized at the start; the output layer stays as it is. int8: with a "
            "scale for each output; int4: in groups of 32; fp8, on a GPU alone: e4m3.",
        ),
    ] = Quantization.NONE
    gpu_memory_fraction: Annotated[
        float | None,
        Option(
            panel=_GPU,
            parse=parse_fraction,
            metavar="FLOAT",
            help="Of a GPU's memory, how much is taken at most, by all workers of `baton up` on it together. Default: "
            f"{DEFAULT_GPU_MEMORY_FRACTION}.",
        ),
    ] = None
    split_keys: Annotated[
        int | None,
        Option(
            flag="--attention-split-keys",
            panel=_GPU,
            parse=parse_split_keys,
            metavar="N",
            help=f"Attention reads a row's keys in pieces of N, a multiple of {SPLIT_KEYS_MULTIPLE}, so that what "
            "attention makes of a row does not depend on its batch. Default: as is fastest for the batch.",
        ),
    ] = None
    # The worker's place among those of one `baton up`: by it, the workers share the machine's GPUs.
    worker_index: int = 0
    num_workers: int = 1

    @property
    def num_ranks(self) -> int:
        """Returns how many processes each worker consists of: as many ranks in each stage."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def gpu_options(self) -> tuple[str, ...]:
        """The options that a user gave and that only a GPU has, as they are on the command line."""
        fields = [field for field in options_of(EngineConfig) if field.option.panel == _GPU]
        given = [(field, value) for field in fields if (value := getattr(self, field.name)) != field.default]
        fp8 = [f"--quantization {Quantization.FP8}"] if self.quantization == Quantization.FP8 else []
        return (*fp8, *(f"{field.flag} {value}" for field, value in given))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomConfig:
    """The workers that are to be started beside those that run on this machine, and for which it may have no room."""

    engine: EngineConfig  # of each, but for its index
    indexes: tuple[int, ...]
