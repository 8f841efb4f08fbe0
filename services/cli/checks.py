"""Options that do not go together, or not with this machine. Each is refused before a model is fetched."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from services.config import DeviceKind, Kernels, KvCacheDtype, ReasoningParser, ToolParser, WorkerRole
from services.config.engine import EngineConfig
from services.config.group import GroupSettings
from services.config.hosts import is_loopback, split_address
from services.config.option import Refusal
from services.protocol.model_files.base import ModelError

if TYPE_CHECKING:
    from services.engine.runner.model_check import ModelFacts
    from services.process.configs import UpConfig


STAGES = "--pipeline-parallel-size"


def check_engine(config: EngineConfig) -> None:
    """Raises Refusal for options of an engine that contradict each other, or that this processor cannot run."""
    from services.engine.kernels.cpu import isa

    try:
        isa.check(os.environ)
    except isa.IsaError as error:
        raise Refusal(str(error)) from error
    if config.device is DeviceKind.CPU and config.gpu_options:
        raise Refusal(f"{config.gpu_options[0]} is for GPUs alone: the device is the CPU")
    if config.device is DeviceKind.CUDA and config.num_ranks > 1:
        option = "--tensor-parallel-size" if config.tensor_parallel_size > 1 else STAGES
        raise Refusal(f"{option} is for the CPU so far: the device is a GPU")
    if config.device is DeviceKind.CUDA and config.expert_parallel:
        raise Refusal("--expert-parallel is for the CPU so far: the device is a GPU")
    if config.device is DeviceKind.CUDA and config.kernels is not Kernels.AUTO:
        raise Refusal(f"--kernels {config.kernels} is for the CPU alone: the device is a GPU")
    if config.device is DeviceKind.CUDA and config.kv_cache_dtype is KvCacheDtype.INT8:
        raise Refusal("--kv-cache-dtype int8 is for the CPU alone: the device is a GPU")
    if config.kv_memory_bytes is not None and config.gpu_memory_fraction is not None:
        raise Refusal("--kv-memory and --gpu-memory-fraction both say how much memory KV gets: say one of both")


def check_stages(role: WorkerRole, num_stages: int) -> None:
    """Raises Refusal for a decode worker of several stages."""
    if role is WorkerRole.DECODE and num_stages > 1:
        raise Refusal(
            f"{STAGES} {num_stages} is for prefill workers: a decode worker would only be slower, as its stages would "
            "compute each token one after the other"
        )


def check_expert_parallel(config: "UpConfig") -> None:
    """Raises Refusal for --expert-parallel where no worker has ranks among which experts could be divided."""
    if config.workers.engine.expert_parallel and not any(map(config.expert_parallel, WorkerRole)):
        raise Refusal(
            "--expert-parallel divides experts among ranks: say how many with --tensor-parallel-size, --prefill-tp or "
            "--decode-tp"
        )


def check_hosts(settings: GroupSettings, engine: EngineConfig) -> None:
    """Raises Refusal for the place of a process in a worker of several hosts that is half said, or cannot be."""
    given = (settings.rank, settings.world_size, settings.group)
    if all(value is None for value in given):
        return
    if settings.rank is None or settings.world_size is None or settings.group is None:
        raise Refusal("--rank, --world-size and --group belong together: name all three")
    if settings.rank >= settings.world_size:
        raise Refusal(f"--rank {settings.rank}: ranks of --world-size {settings.world_size} are numbered from 0")
    if engine.device is DeviceKind.CUDA:
        raise Refusal("--group is for the CPU so far: the device is a GPU")
    if engine.pipeline_parallel_size > 1:
        raise Refusal(f"{STAGES} {engine.pipeline_parallel_size} is for ranks of one host: leave it or --group out")
    if engine.tensor_parallel_size not in (1, settings.world_size):
        raise Refusal(
            f"--tensor-parallel-size {engine.tensor_parallel_size}: with --group there is one rank on each host, and "
            f"--world-size {settings.world_size} says how many"
        )


def check_reach(settings: GroupSettings, role: WorkerRole, address: str) -> None:
    """Raises Refusal for a rank above 0 of a prefill worker whose KV no other host could read over gRPC.

    address: where other workers are told to reach it.
    """
    if role is not WorkerRole.PREFILL or not settings.is_led or settings.group is None or not is_loopback(address):
        return
    if not is_loopback(split_address(settings.group)[0]):
        raise Refusal(
            f"--rank {settings.rank} would have decode workers read its KV at {address}, which no other host reaches: "
            f"name an address of this host with --host or --advertise-host, as --group {settings.group} is not loopback"
        )


def check_model(config: EngineConfig, num_workers: int) -> "ModelFacts":
    """Facts about the model of so many workers of this machine. Raises Refusal for one that they cannot serve."""
    from services.engine.runner.model_check import check_model

    try:
        return check_model(config, num_workers)
    except ModelError as error:
        raise Refusal(str(error)) from error


def generates(model: Path) -> bool:
    """Returns False for a model that makes embeddings alone, whose workers are prefill workers. Raises Refusal."""
    from services.protocol.model_files.info import generates
    from services.protocol.model_files.open import open_model

    try:
        return generates(open_model(model).config())
    except ModelError as error:
        raise Refusal(str(error)) from error


def summarize_model(config: EngineConfig) -> str:
    """Returns one line on a model that can be served. Raises Refusal."""
    from services.engine.runner.model_report import summary

    try:
        return summary(config)
    except ModelError as error:
        raise Refusal(str(error)) from error


def advertised_host(host: str, given: str | None, redis_url: str | None) -> str | None:
    """The address that a worker registers in Redis; None without Redis. given: by --advertise-host. Raises Refusal."""
    if redis_url is None:
        if given is not None:
            raise Refusal("--advertise-host is for workers that register in Redis; name it with --redis-url")
        return None
    if given is None and host in ("0.0.0.0", "::"):
        raise Refusal(f"--host {host} is no address to go to: name one with --advertise-host")
    return given or host


def check_model_aliases(served_names: str, aliases: Sequence[str]) -> None:
    """Raises Refusal for an alias of a name that is not served."""
    for alias in aliases:
        name = alias.rpartition("=")[2]
        if name not in served_names.split(","):
            raise Refusal(f"--model-alias {alias}: {name} is none of the served names; see --served-model-name")


def check_parsers(tools: ToolParser, reasoning: ReasoningParser) -> None:
    """Raises Refusal for the form `harmony` beside another: it is that of calls and reasoning together."""
    tool_forms = {ToolParser.AUTO, ToolParser.NONE, ToolParser.HARMONY}
    reasoning_forms = {ReasoningParser.AUTO, ReasoningParser.NONE, ReasoningParser.HARMONY}
    in_channels = tools is ToolParser.HARMONY or reasoning is ReasoningParser.HARMONY
    if in_channels and not (tools in tool_forms and reasoning in reasoning_forms):
        raise Refusal(
            f"--tool-parser {tools} and --reasoning-parser {reasoning}: harmony goes with auto and none alone"
        )


def check_keys(hosts: Sequence[str], api_keys: Sequence[str], file: Path | None, allow_anonymous: bool) -> None:
    """Raises Refusal for addresses that other machines reach and no key, unless the user allows it; for a bad file.

    hosts: by --host and --admin-host.
    """
    if file is not None:
        _check_keys_file(file)
        return
    if api_keys or allow_anonymous:
        return
    for flag, host in zip(("--host", "--admin-host"), hosts, strict=True):
        if not is_loopback(host):
            raise Refusal(
                f"{flag} {host} needs keys (--keys FILE or BATON_API_KEY) or --allow-anonymous: else anyone on that "
                "network may use the gateway, and see what it does"
            )


def _check_keys_file(path: Path) -> None:
    from services.gateway.keys.file import KeysFileError, read_keys

    try:
        read_keys(path)
    except KeysFileError as error:
        raise Refusal(str(error)) from error
