"""Makes a runner from a model directory and limits: decides all that they leave open, and refuses what does not fit."""

import atexit
from dataclasses import dataclass

import torch

from services.config import DeviceKind
from services.config.engine import EngineConfig
from services.engine.kernels.cpu.isa import known_isa
from services.engine.kernels.cpu.openmp import loaded_openmp
from services.engine.kernels.load import why_not_fused
from services.engine.models.architectures import num_parameters
from services.engine.models.registry import load_weights
from services.engine.quantization.kept import KeptForms
from services.engine.runner.base import Runner
from services.engine.runner.cpu.cores import CoreShare
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.runner.load_plan import LoadPlan, dtype_name, plan_load
from services.engine.runner.memory import check_fits, kv_budget
from services.engine.runner.progress import KERNELS, WEIGHTS, Progress, Untold


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
    notices: tuple[str, ...]  # decisions that a person should hear of, one line each


def load_runner(engine: EngineConfig, progress: Progress | None = None) -> LoadedModel:
    """Reads the model, chooses options that the configuration left open, and allocates the pool. Raises ModelError.

    progress: hears how far this is. Sets the threads of this process's torch when the configuration names them.
    """
    plan, progress = plan_load(engine), progress or Untold()
    cores = _cores(engine, plan.device)
    if plan.device.type == "cpu":
        runner, kernels, notices = _load_cpu(plan, cores, progress)
    else:
        from services.engine.runner.gpu.load import load_gpu  # Triton is installed only with torch for GPUs

        (runner, notices), kernels = load_gpu(plan, progress), DeviceKind.CUDA.value
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
        notices=(*plan.notices, *notices, *_length_notices(plan.wanted_len, max_model_len, num_blocks)),
    )


def _load_cpu(plan: LoadPlan, cores: CoreShare | None, progress: Progress) -> tuple[Runner, str, tuple[str, ...]]:
    """Returns the runner, the name of the kernels that compute its steps, and notices for a person."""
    engine, config, dtype = plan.engine, plan.config, dtype_name(plan.dtype)
    num_bytes = num_parameters(config) * plan.dtype.itemsize
    check_fits(num_bytes, f"the model's weights in {dtype}")
    progress.stage(WEIGHTS, num_bytes)
    not_fused = why_not_fused(dtype) if engine.kernels == "auto" else "the configuration says so"
    kept = KeptForms()
    with plan.tensors() as tensors:
        weights = load_weights(
            tensors, config, plan.dtype, fused=not_fused is None, on_read=progress.advance, kept=kept
        )
    if plan.rounds_weights:
        kept.require(f"--quantization {engine.quantization}")
    progress.stage(KERNELS)
    num_blocks = plan.num_blocks(kv_budget(engine.kv_memory_bytes)) if config.is_causal else plan.num_unkept_blocks
    runner = TorchRunner(config, weights, num_blocks, engine.block_size, fused=not_fused is None, cores=cores)
    kernels = known_isa().name if not_fused is None else "torch"
    return runner, kernels, (*_kernel_notices(engine, dtype), *kept.notices())


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


def _kernel_notices(engine: EngineConfig, dtype: str) -> tuple[str, ...]:
    if engine.kernels != "auto" or dtype == "float16":  # the configuration chose, or `load_plan` notices it
        return ()
    reason = why_not_fused(dtype)
    return () if reason is None else (f"torch's operations are used, kernels would be faster: {reason}",)


def _length_notices(wanted_len: int, max_model_len: int, num_blocks: int) -> tuple[str, ...]:
    if max_model_len == wanted_len:
        return ()
    return (f"max_model_len lowered from {wanted_len} to {max_model_len}: the KV pool has {num_blocks} blocks",)
