"""Makes a runner on the CPU from a plan: maps or reads the weights, compiles kernels, allocates the pool."""

from dataclasses import dataclass
from functools import partial

import structlog

from services.config import LoadFormat
from services.config.engine import EngineConfig
from services.engine.kernels.cpu.isa import known_isa
from services.engine.kernels.load import why_not_fused
from services.engine.models.base import Weights
from services.engine.models.registry import load_weights, weight_files
from services.engine.quantization.kept import KeptForms
from services.engine.runner.base import LoadedWeights
from services.engine.runner.cpu.attention import StoredKv
from services.engine.runner.cpu.place import Place
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.runner.kept_bytes import kept_bytes
from services.engine.runner.load_plan import LoadPlan, dtype_name
from services.engine.runner.memory import check_fits, freed_at_once, kv_budget
from services.engine.runner.progress import KERNELS, WEIGHTS, Progress
from services.engine.runner.share_choice import why_not_shared

ReadWeights = tuple[Weights, tuple[str, ...]]  # and notices for a person
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class CpuModel:
    """A runner on the CPU, and what was decided for it."""

    runner: TorchRunner
    kernels: str  # the class of processors of the kernels that compute its steps, or "torch"
    weights: LoadedWeights
    notices: tuple[str, ...]  # for a person


def load_cpu(plan: LoadPlan, place: Place, progress: Progress, num_blocks: int | None = None) -> CpuModel:
    """Loads the model of a plan, or the part of it that a rank has. Raises ModelError. Of the process's malloc, it sets
    what `freed_at_once` does.

    num_blocks: of the pool; None: as many as its memory has room for.
    """
    engine, config, dtype = plan.engine, plan.config, dtype_name(plan.dtype)
    not_fused = why_not_fused(dtype) if engine.kernels == "auto" else "the configuration says so"
    (weights, kept), facts = _weights(plan, progress, not_fused)
    progress.stage(KERNELS)
    runner = TorchRunner(
        config,
        weights,
        _num_blocks(plan) if num_blocks is None else num_blocks,
        engine.block_size,
        kv=StoredKv(plan.layout, plan.kv_scales),
        fused=not_fused is None,
        place=place,
    )
    kernels = known_isa().name if not_fused is None else "torch"
    return CpuModel(runner, kernels, facts, (*_kernel_notices(engine, dtype), *kept))


def _num_blocks(plan: LoadPlan) -> int:
    if not plan.config.is_causal:
        return plan.num_unkept_blocks
    return plan.num_blocks(kv_budget(plan.engine.kv_memory_bytes))


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
    return read(), LoadedWeights(weight_bytes(plan), not_shared)


def _read_weights(plan: LoadPlan, progress: Progress, *, fused: bool) -> ReadWeights:
    num_bytes, kept = weight_bytes(plan), KeptForms()
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
    shard = plan.config.sharded
    part = None if shard is None else (shard.rank, shard.size, plan.config.stage.layers, shard.expert_parallel)
    return name_of(plan.fingerprint(), dtype_name(plan.dtype), plan.engine.quantization.value, files, part)


def weight_bytes(plan: LoadPlan) -> int:
    """Returns the bytes of all weights as the model computes with them."""
    return kept_bytes(plan.engine, plan.config, dtype_name(plan.dtype))


def _kernel_notices(engine: EngineConfig, dtype: str) -> tuple[str, ...]:
    if engine.kernels != "auto" or dtype == "float16":  # the configuration chose, or `load_plan` notices it
        return ()
    reason = why_not_fused(dtype)
    return () if reason is None else (f"torch's operations are used, kernels would be faster: {reason}",)
