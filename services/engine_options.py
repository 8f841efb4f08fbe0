"""Options of one engine on the command line: those that `baton up`, `baton prefill` and `baton decode` all have."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from services.config import (
    CPU_ISA_VARIABLE,
    DEFAULT_GPU_MEMORY_FRACTION,
    SPLIT_KEYS_MULTIPLE,
    Device,
    EngineConfig,
    KvCacheDtype,
    LoadFormat,
    Quantization,
)

_MEMORY_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_DEFAULT = EngineConfig(model=Path())
_ENGINE, _GPU = "Engine, of each worker", "Engine, on a GPU alone"  # panels of the help


class Kernels(StrEnum):
    """What computes attention and the small operations."""

    AUTO = "auto"
    TORCH = "torch"


class Dtype(StrEnum):
    """What a model computes in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def parse_memory(text: str) -> int:
    """Bytes of `512MiB`, `4GiB`, `1.5gb` or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _MEMORY_UNITS:
        raise typer.BadParameter(f"{text!r} is no amount of memory; write 512MiB, 4GiB or a number of bytes")
    return int(float(match[1]) * _MEMORY_UNITS[match[2]])


def parse_fraction(text: str) -> float:
    """More than 0, at most 1."""
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise typer.BadParameter(f"{text!r} is no fraction; write a number above 0 and at most 1")
    return fraction


def parse_split_keys(text: str) -> int:
    """A multiple of the keys that kernels read at once."""
    keys = int(text) if text.strip().isdecimal() else 0
    if keys < 1 or keys % SPLIT_KEYS_MULTIPLE:
        raise typer.BadParameter(f"{text!r} is no multiple of {SPLIT_KEYS_MULTIPLE}")
    return keys


def _option(panel: str = _ENGINE, **settings: Any) -> Any:
    return typer.Option(rich_help_panel=panel, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What was said of an engine. Fields are options of the command line, with their defaults."""

    device: Annotated[
        Device, _option(help="Where the model runs. auto: on a GPU where torch sees one, else on the CPU.")
    ] = _DEFAULT.device
    dtype: Annotated[
        Dtype, _option(help="What the model computes in; auto: the checkpoint's own, bfloat16 for a GGUF file.")
    ] = Dtype.AUTO
    load_format: Annotated[
        LoadFormat,
        _option(
            help="auto: the checkpoint's weights. dummy: random ones, and of the model only config.json and "
            "tokenizer are read."
        ),
    ] = _DEFAULT.load_format
    max_model_len: Annotated[
        int | None, _option(min=1, help="Longest sequence, prompt included. Default: the model's own, if it fits.")
    ] = _DEFAULT.max_model_len
    max_num_seqs: Annotated[int, _option(min=1, help="Sequences in one step, at most.")] = _DEFAULT.max_num_seqs
    max_num_batched_tokens: Annotated[int, _option(min=1, help="Tokens in one step; longer prompts run in chunks.")] = (
        _DEFAULT.max_num_batched_tokens
    )
    block_size: Annotated[int, _option(min=1, help="Token positions in one KV block.")] = _DEFAULT.block_size
    kv_memory: Annotated[
        int | None,
        _option(
            parser=parse_memory,
            metavar="SIZE",
            help="KV memory of each worker: 512MiB, 4GiB. Default: a quarter of the free memory, at most 4GiB; "
            "on a GPU what --gpu-memory-fraction leaves.",
        ),
    ] = _DEFAULT.kv_memory_bytes
    num_threads: Annotated[
        int | None,
        _option(min=1, help="CPU threads of each worker. Default: all cores, shared by those that step."),
    ] = _DEFAULT.num_threads
    kernels: Annotated[
        Kernels,
        _option(
            help="On the CPU. auto: kernels that numba compiles for the processor's class, or for the lower one that "
            f"{CPU_ISA_VARIABLE} in the environment names (amx, avx512_bf16, avx512, avx2), where they can run. torch: "
            "its own operations alone."
        ),
    ] = Kernels.AUTO
    quantization: Annotated[
        Quantization,
        _option(
            _GPU,
            help="fp8: weights of linear layers are made e4m3 at the start, with a scale for each "
            "output; the output layer stays as it is.",
        ),
    ] = _DEFAULT.quantization
    kv_cache_dtype: Annotated[
        KvCacheDtype,
        _option(
            _GPU,
            help="auto: KV is stored as the model computes. fp8: e4m3, with the checkpoint's scales, else 1.",
        ),
    ] = _DEFAULT.kv_cache_dtype
    gpu_memory_fraction: Annotated[
        float | None,
        _option(
            _GPU,
            parser=parse_fraction,
            metavar="FLOAT",
            help="Of a GPU's memory, how much is taken at most, by all workers of `baton up` on it together. Default: "
            f"{DEFAULT_GPU_MEMORY_FRACTION}.",
        ),
    ] = _DEFAULT.gpu_memory_fraction
    attention_split_keys: Annotated[
        int | None,
        _option(
            _GPU,
            parser=parse_split_keys,
            metavar="N",
            help=f"Attention reads a row's keys in pieces of N, a multiple of {SPLIT_KEYS_MULTIPLE}, so that what "
            "attention makes of a row does not depend on its batch. Default: as is fastest for the batch.",
        ),
    ] = _DEFAULT.split_keys
    # For the launcher alone.
    worker_index: Annotated[int, _option(min=0, hidden=True)] = _DEFAULT.worker_index
    num_workers: Annotated[int, _option(min=1, hidden=True)] = _DEFAULT.num_workers

    def config(self, model: Path) -> EngineConfig:
        """The engine of a model."""
        return EngineConfig(
            model=model,
            device=self.device,
            dtype=self.dtype.value,
            block_size=self.block_size,
            kv_memory_bytes=self.kv_memory,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_threads=self.num_threads,
            kernels=self.kernels.value,
            load_format=self.load_format,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            gpu_memory_fraction=self.gpu_memory_fraction,
            split_keys=self.attention_split_keys,
            worker_index=self.worker_index,
            num_workers=self.num_workers,
        )


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of EngineOptions, which it gets as one argument, `engine`."""
    own = inspect.signature(command).parameters
    fields = inspect.signature(EngineOptions).parameters

    def parsed(**values: Any) -> None:
        engine = EngineOptions(**{name: values.pop(name) for name in fields})
        command(engine=engine, **values)

    parameters = [*(own[name] for name in own if name != "engine"), *fields.values()]
    parsed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    parsed.__name__, parsed.__doc__ = command.__name__, command.__doc__
    return parsed
