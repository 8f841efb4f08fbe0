"""Makes a runner on a GPU: loads the weights, tries the largest step, then allocates a pool in the remaining memory."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from services.config import LoadFormat
from services.engine.kernels.gpu.launch import UnsupportedShape
from services.engine.models.architectures import num_parameters
from services.engine.models.base import Weights
from services.engine.models.registry import load_weights, weight_files
from services.engine.quantization.kept import KeptForms
from services.engine.runner.base import spare_blocks
from services.engine.runner.gpu.device import CudaDevice
from services.engine.runner.gpu.gpu_runner import GpuRunner, StepLimits
from services.engine.runner.gpu.makers import makers_for
from services.engine.runner.gpu.memory import CardMemory, check_weights_fit, kv_budget
from services.engine.runner.load_plan import LoadPlan
from services.engine.runner.progress import KERNELS, WEIGHTS, Progress
from services.protocol.model_files.base import ModelError


def load_gpu(plan: LoadPlan, progress: Progress) -> tuple[GpuRunner, tuple[str, ...]]:
    """Returns the runner, ready for its first step, and notices for a person. Raises ModelError.

    progress: hears how far this is.
    """
    device, kept = CudaDevice(plan.device.index), KeptForms()
    free, total = torch.cuda.mem_get_info(plan.device)
    with _refused_in_words():
        weights = _load_weights(plan, free, progress, kept)
        progress.stage(KERNELS)
        step_bytes = _step_bytes(plan, weights, device)
        free, _ = torch.cuda.mem_get_info(plan.device)
        own = int(torch.cuda.memory_reserved(plan.device))  # without other processes' memory: they may be loading, too
        card = CardMemory(total=total, free=free, own=own, step=step_bytes)
        budget = kv_budget(card, fraction=plan.gpu_memory_fraction, asked=plan.engine.kv_memory_bytes)
        runner = _runner(plan, weights, device, plan.num_blocks(budget))
        runner.warm_up()
    torch.cuda.synchronize(plan.device)
    return runner, kept.notices()


def _load_weights(plan: LoadPlan, free: int, progress: Progress, kept: KeptForms) -> Weights:
    num_bytes = _least_bytes(plan)
    check_weights_fit(num_bytes, free)
    progress.stage(WEIGHTS, num_bytes)
    makers = makers_for(plan.engine.quantization, torch.cuda.get_device_capability(plan.device))
    with torch.inference_mode(), plan.tensors() as tensors:
        weights = load_weights(
            tensors,
            plan.config,
            plan.dtype,
            makers=makers,
            on_read=progress.advance,
            kept=kept,
        )
    if plan.rounds_weights:
        kept.require(f"--quantization {plan.engine.quantization}")
    return weights


def _least_bytes(plan: LoadPlan) -> int:
    """Returns the bytes of all weights in numbers, or as they are stored if these are fewer: codes may stay codes."""
    num_bytes: int = num_parameters(plan.config) * plan.dtype.itemsize
    if plan.engine.load_format == LoadFormat.DUMMY:
        return num_bytes
    stored: int = sum(end - begin for file in weight_files(plan.engine.model) for begin, end in file.extents)
    return min(num_bytes, stored)


def _step_bytes(plan: LoadPlan, weights: Weights, device: CudaDevice) -> int:
    """Returns the bytes that steps take beside weights and KV: the most of the largest step and the largest recorded
    one.

    All tokens of these steps share one block.
    """
    torch.cuda.empty_cache()
    before = int(torch.cuda.memory_reserved(plan.device))
    torch.cuda.reset_peak_memory_stats(plan.device)
    trial = _runner(plan, weights, device, num_blocks=1)
    trial.run_largest()
    taken = int(torch.cuda.max_memory_reserved(plan.device)) - before
    del trial
    gc.collect()
    torch.cuda.empty_cache()
    return taken


def _runner(plan: LoadPlan, weights: Weights, device: CudaDevice, num_blocks: int) -> GpuRunner:
    num_all = spare_blocks(num_blocks, plan.engine.block_size).stop
    pool = torch.zeros(num_all, plan.layout.block_bytes, dtype=torch.uint8, device=plan.device)
    limits = StepLimits(
        max_num_seqs=plan.engine.max_num_seqs,
        max_num_batched_tokens=plan.engine.max_num_batched_tokens,
        max_model_len=plan.wanted_len,
        split_keys=plan.engine.split_keys,
    )
    return GpuRunner(plan.config, weights, pool, plan.layout, device, limits, kv_scales=plan.kv_scales)


@contextmanager
def _refused_in_words() -> Iterator[None]:
    try:
        yield
    except UnsupportedShape as error:
        raise ModelError(str(error)) from error
    except RuntimeError as error:
        if not isinstance(error, torch.cuda.OutOfMemoryError) and "ALLOC_FAILED" not in str(error):
            raise
        raise ModelError(f"the GPU has too little memory for this model: {str(error).partition('. ')[0]}") from error
