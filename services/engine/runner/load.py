"""Makes a runner from a model directory and limits: decides all that they leave open, and refuses what does not fit."""

import atexit
from dataclasses import dataclass

import torch

from services.config import DeviceKind, LogFormat
from services.config.engine import EngineConfig
from services.engine.kernels.cpu.openmp import loaded_openmp
from services.engine.runner.base import LoadedWeights, RankGroup, Runner
from services.engine.runner.cpu.cores import CoreShare
from services.engine.runner.cpu.load import load_cpu, weight_bytes
from services.engine.runner.cpu.place import Place
from services.engine.runner.group.hosts.host_ranks import HostRanks
from services.engine.runner.group.hosts.load_hosts import load_hosts
from services.engine.runner.group.hosts.place import HostPlace
from services.engine.runner.group.load_group import load_group
from services.engine.runner.load_plan import plan_load
from services.engine.runner.progress import Progress, Untold


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A runner, and the facts about the model that its engine and its worker need."""

    runner: Runner
    kernels: str  # the class of processors of the kernels that compute steps, "torch" or "cuda"
    pipeline_depth: int  # of the engine
    cores: CoreShare | None  # the runner's
    fingerprint: str  # models with the same one may exchange KV
    max_model_len: int  # tokens of one sequence, prompt and generated ones
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    weights: LoadedWeights
    notices: tuple[str, ...]  # decisions that a person should hear of, one line each
    group: RankGroup | None = None  # of the processes that share the model; None: it is in one process
    hosts: HostRanks | None = None  # those of them that are on other hosts; None: all are on this one


def load_runner(
    engine: EngineConfig,
    progress: Progress | None = None,
    log_format: LogFormat = LogFormat.TEXT,
    place: HostPlace | None = None,
) -> LoadedModel:
    """Reads the model, chooses options that the configuration left open, and allocates the pool. Raises ModelError.

    progress: hears how far this is. log_format: of the processes of further ranks, which live as long as the thread
    that calls this. place: rank 0's, where ranks are hosts; None: all are on this host. Sets the threads of this
    process's torch when the configuration names them.
    """
    plan, progress = plan_load(engine), progress or Untold()
    runner: Runner
    ranks: RankGroup | None = None
    hosts: HostRanks | None = None
    cores = _cores(engine, plan.device)
    if engine.num_ranks > 1:
        if place is None:
            group = load_group(plan, cores, progress, log_format)
        else:
            loaded_hosts = load_hosts(plan, cores, progress, place)
            group, hosts = loaded_hosts.group, loaded_hosts.others
        runner, kernels, weights, notices = group.runner, group.kernels, group.weights, group.notices
        ranks = group.runner
    elif plan.device.type == "cpu":
        loaded = load_cpu(plan, Place(cores), progress)
        runner, kernels, weights, notices = loaded.runner, loaded.kernels, loaded.weights, loaded.notices
    else:
        from services.engine.runner.gpu.load import load_gpu  # Triton is installed only with torch for GPUs

        (runner, notices), kernels = load_gpu(plan, progress), DeviceKind.CUDA.value
        weights = LoadedWeights(weight_bytes(plan), "they are on a GPU")
    num_blocks = runner.num_blocks // runner.layout.num_slices
    max_model_len = min(plan.wanted_len, num_blocks * engine.block_size)
    return LoadedModel(
        runner=runner,
        kernels=kernels,
        pipeline_depth=0 if plan.device.type == "cpu" else 1,
        cores=cores,
        fingerprint=plan.fingerprint(),
        max_model_len=max_model_len,
        vocab_size=plan.config.vocab_size,
        eos_token_ids=plan.eos_token_ids,
        weights=weights,
        notices=(*plan.notices, *notices, *_length_notices(plan.wanted_len, max_model_len, num_blocks)),
        group=ranks,
        hosts=hosts,
    )


def _cores(engine: EngineConfig, device: torch.device) -> CoreShare | None:
    """Returns the share of the cores of a worker that computes on the CPU."""
    openmp = loaded_openmp()
    if openmp is not None and device.type == "cpu":
        share = CoreShare(openmp, engine.num_threads)
        atexit.register(share.leave)
        return share
    if engine.num_threads is not None:
        torch.set_num_threads(engine.num_threads)
    return None


def _length_notices(wanted_len: int, max_model_len: int, num_blocks: int) -> tuple[str, ...]:
    if max_model_len == wanted_len:
        return ()
    return (f"max_model_len lowered from {wanted_len} to {max_model_len}: the KV pool has {num_blocks} blocks",)
