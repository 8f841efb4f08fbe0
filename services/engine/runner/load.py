"""Makes a runner from a model directory and limits: decides all that they leave open, and refuses what does not fit."""

import atexit
from dataclasses import dataclass
from functools import partial

import structlog
import torch

from services.config import DeviceKind, LoadFormat
from services.config.engine import EngineConfig
from services.engine.kernels.cpu.isa import known_isa
from services.engine.kernels.cpu.openmp import loaded_openmp
from services.engine.kernels.load import why_not_fused
from services.engine.models.base import Weights
from services.engine.models.registry import load_weights, weight_files
from services.engine.quantization.kept import KeptForms
from services.engine.runner.base import LoadedWeights, Runner
from services.engine.runner.cpu.attention import StoredKv
from services.engine.runner.cpu.cores import CoreShare
from services.engine.runner.cpu.place import Place
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.runner.kept_bytes import kept_bytes
from services.engine.runner.load_plan import LoadPlan, dtype_name, plan_load
from services.engine.runner.memory import check_fits, freed_at_once, kv_budget
from services.engine.runner.progress import KERNELS, WEIGHTS, Progress, Untold
from services.engine.runner.share_choice import why_not_shared

ReadWeights = tuple[Weights, tuple[str, ...]]  # and notices for a person
log = structlog.get_logger()


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


def load_runner(engine: EngineConfig, progress: Progress | None = None) -> LoadedModel:
    """Reads the model, chooses options that the configuration left open, and allocates the pool. Raises ModelError.

    progress: hears how far this is. Sets the threads of this process's torch when the configuration names them. Of the
    process's malloc, a load on a CPU sets what `freed_at_once` does.
    """
    plan, progress = plan_load(engine), progress or Untold()
    cores = _cores(engine, plan.device)
    if plan.device.type == "cpu":
        runner, kernels, weights, notices = _load_cpu(plan, cores, progress)
    else:
        from services.engine.runner.gpu.load import load_gpu  # Triton is installed only with torch for GPUs

        (runner, notices), kernels = load_gpu(plan, progress), DeviceKind.CUDA.value
        weights = LoadedWeights(_weight_bytes(plan), "they are on a GPU")
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
    )


def _load_cpu(
    plan: LoadPlan, cores: CoreShare | None, progress: Progress
) -> tuple[Runner, str, LoadedWeights, tuple[str, ...]]:
    """Returns the runner, the name of the kernels that compute its steps, facts on its weights, and notices for a
    person.
    """
    engine, config, dtype = plan.engine, plan.config, dtype_name(plan.dtype)
    not_fused = why_not_fused(dtype) if engine.kernels == "auto" else "the configuration says so"
    (weights, kept), facts = _weights(plan, progress, not_fused)
    progress.stage(KERNELS)
    num_blocks = plan.num_blocks(kv_budget(engine.kv_memory_bytes)) if config.is_causal else plan.num_unkept_blocks
    runner = TorchRunner(
        config,
        weights,
        num_blocks,
        engine.block_size,
        kv=StoredKv(plan.layout, plan.kv_scales),
        fused=not_fused is None,
        place=Place(cores),
    )
    kernels = known_isa().name if not_fused is None else "torch"
    return runner, kernels, facts, (*_kernel_notices(engine, dtype), *kept)


def _weights(plan: LoadPlan, progress: Progress, not_fused: str | None) -> tuple[ReadWeights, LoadedWeights]:
    """Maps the weights of another worker, or reads them. Raises ModelError."""
    read = partial(_read_weights, plan, progress, fused=not_fused is None)
    not_shared = why_not_shared(plan.engine, not_fused)
    if not_shared is None:
        from services.engine.runner.cpu.shared_weights import share_weights  # numba may not be there
        from services.engine.runner.cpu.weight_holders import NotSharedError

        try:
            shared = share_weights(_name(plan), read, progress)
            return shared.weights, LoadedWeights(shared.num_bytes, None)
        except NotSharedError as error:
            not_shared = str(error)
            log.warning("weights are not shared with other workers", reason=not_shared)
    # Outside of the clause: what the exception holds is freed, a part of the weights perhaps.
    return read(), LoadedWeights(_weight_bytes(plan), not_shared)


def _read_weights(plan: LoadPlan, progress: Progress, *, fused: bool) -> ReadWeights:
    num_bytes, kept = _weight_bytes(plan), KeptForms()
    check_fits(num_bytes, f"the model's weights in {dtype_name(plan.dtype)}")
    progress.stage(WEIGHTS, num_bytes)
    with freed_at_once(), plan.tensors() as tensors:
        weights = load_weights(tensors, plan.config, plan.dtype, fused=fused, on_read=progress.advance, kept=kept)
    if plan.rounds_weights:
        kept.require(f"--quantization {plan.engine.quantization}")
    return weights, kept.notices()


def _name(plan: LoadPlan) -> str:
    """Returns the name that weights have in common which are the same in memory."""
    from services.engine.runner.cpu.shared_weights import name_of

    files = []
    if plan.engine.load_format != LoadFormat.DUMMY:
        # The fingerprint is made of samples. A file that was changed in between is another one by its times.
        stats = [file.path.stat() for file in weight_files(plan.engine.model)]
        files = [(each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in stats]
    return name_of(plan.fingerprint(), dtype_name(plan.dtype), plan.engine.quantization.value, files)


def _weight_bytes(plan: LoadPlan) -> int:
    """Returns the bytes of all weights as the model computes with them."""
    return kept_bytes(plan.engine, plan.config, dtype_name(plan.dtype))


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
