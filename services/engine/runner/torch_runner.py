"""Runs a model on the CPU with torch.

The KV pool is one zeroed piece of memory that torch and transports share. `load_runner` makes a runner from a model
directory and limits: whatever they leave open is decided there, and whatever does not fit is refused there.
"""

from collections import deque
from dataclasses import asdict, dataclass
from itertools import count

import numpy as np
import torch

from kvtransfer.layout import KvLayout, fingerprint
from services.config import EngineConfig
from services.engine.attention.base import PagedQueries
from services.engine.attention.cpu_attention import CpuAttention
from services.engine.kernels.load import make_operations, why_not_fused
from services.engine.models.base import DTYPES, ModelConfig, Weights
from services.engine.models.checkpoint import weights_id
from services.engine.models.registry import (
    load_weights,
    make_model,
    num_parameters,
    parse_model_config,
    stored_dtype,
)
from services.engine.openmp import loaded_openmp
from services.engine.runner.base import ScoredTokens, StepInput, StepLogprobs, StepOutput
from services.engine.runner.cores import CoreLease
from services.engine.runner.leased_operations import LeasedOperations
from services.engine.runner.memory import allocate, check_fits, kv_budget
from services.engine.sampler import sample, score
from services.protocol.model_dir import ModelError, read_config, read_generation_defaults

# On a Xeon with AVX512-FP16 and AMX, [512, 1024] x [1024, 4096] took 26 ms in float16 and float32, 3.7 in bfloat16.
_FLOAT16_IS_SLOW = (
    "the checkpoint is float16 and runs in it, on a CPU as slowly as float32; dtype bfloat16 is faster, less exact"
)
_SCORED_AT_ONCE = 256  # tokens of prompts
_MANY_PROMPT_TOKENS = 64  # in a step: fewer do not make it much longer
_MIN_BLOCKS = 2  # a prompt and its next position


class TorchRunner:
    """`Runner` on the CPU. A step runs to its end inside `launch`, which so raises what makes it fail."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        num_blocks: int,
        block_size: int,
        *,
        fused: bool,
        cores: CoreLease | None = None,
    ) -> None:
        self.layout = kv_layout(config, block_size, weights.dtype)
        self.num_blocks = num_blocks
        self.vocab_size = config.vocab_size
        self.window = config.window
        self._bytes = allocate(num_blocks * self.layout.block_bytes)
        pool = torch.from_numpy(self._bytes).view(weights.dtype).view(self.layout.shape(num_blocks))
        self._cores = cores
        self._attention = CpuAttention(
            pool,
            self.layout,
            config.num_heads,
            config.scale,
            fused=fused,
            before_layer=lambda: None if cores is None else cores.adjust(),
        )
        operations = make_operations(self.layout.dtype, fused=fused)
        if cores is not None:
            operations = LeasedOperations(operations, cores)
        self._model = make_model(config, weights, self._attention, operations)
        self._done: deque[StepOutput] = deque()

    def kv_bytes(self) -> np.ndarray:
        """The pool as uint8[num_blocks, block_bytes]: the same memory."""
        return self._bytes.reshape(self.num_blocks, -1)

    def copy_block(self, source: int, destination: int) -> None:
        """See Runner."""
        blocks = self.kv_bytes()
        blocks[destination] = blocks[source]

    def launch(self, step: StepInput) -> None:
        """Runs the step."""
        assert len(self._done) < 2, "two steps are launched and not collected"
        assert step.carried is None, "a step that is over when its launch returns leaves no token unknown"
        if self._cores is not None:
            self._cores.begin(prompts=len(step.token_ids) - len(step.seq_lens) >= _MANY_PROMPT_TOKENS)
        try:
            with torch.inference_mode():
                self._done.append(self._run(step))
        finally:
            if self._cores is not None:
                self._cores.end()

    def collect(self) -> StepOutput:
        """What the oldest step that was not collected sampled."""
        return self._done.popleft()

    def _run(self, step: StepInput) -> StepOutput:
        plan = self._attention.prepare(PagedQueries(step.query_starts, step.seq_lens, step.block_tables), self.window)
        token_ids, positions = torch.from_numpy(step.token_ids).to(torch.int64), torch.from_numpy(step.positions)
        sampled = step.query_starts[step.sample_rows + 1].astype(np.int64) - 1
        if step.scored is None and np.array_equal(sampled, np.arange(len(token_ids))):
            return sample(self._model.all_logits(token_ids, positions, plan), step.sampling)
        queries = sampled if step.scored is None else np.concatenate([sampled, step.scored.queries])
        hidden = self._model.forward(token_ids, positions, plan, torch.from_numpy(queries))
        if len(sampled):
            output = sample(self._model.logits(hidden[: len(sampled)]), step.sampling)
        else:
            output = _nothing(step.sampling.any_logprobs)
        if step.scored is not None:
            output.scored = self._score(hidden[len(sampled) :], step.scored)
        return output

    def _score(self, hidden: torch.Tensor, scored: ScoredTokens) -> StepLogprobs:
        """A few tokens at a time: the logits of a whole chunk would take as much memory as a model."""
        width = int(scored.num_logprobs.max())
        parts = [
            score(self._model.logits(some), scored.successors[start : start + len(some)], width)
            for start, some in zip(count(0, _SCORED_AT_ONCE), hidden.split(_SCORED_AT_ONCE), strict=False)
        ]
        return StepLogprobs(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in StepLogprobs.__slots__)
        )


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A runner and what its engine and its worker have to know of the model."""

    runner: TorchRunner
    cores: CoreLease | None  # that the runner takes part in
    fingerprint: str  # whose KV may be exchanged with it
    max_model_len: int  # tokens of one sequence, prompt and generated ones
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    notices: tuple[str, ...]  # decisions that a person should hear of, one line each


def load_runner(engine: EngineConfig) -> LoadedModel:
    """Reads the model, chooses what the configuration left open, and allocates the pool. Raises ModelError.

    Sets the number of threads of this process's torch when the configuration names one.
    """
    if engine.device != "cpu":
        raise ModelError(f"device {engine.device!r} is not supported (only 'cpu')")
    raw = read_config(engine.model)
    config = parse_model_config(raw)
    wanted_len = _wanted_len(engine, config)
    dtype, dtype_notices = _dtype(engine, config)
    layout = kv_layout(config, engine.block_size, dtype)
    check_fits(num_parameters(config) * dtype.itemsize, f"the model's weights in {layout.dtype}")
    not_fused = why_not_fused(layout.dtype) if engine.kernels == "auto" else "the configuration says so"
    weights = load_weights(engine.model, config, dtype, fused=not_fused is None)
    num_blocks = _num_blocks(engine, layout)
    max_model_len = min(wanted_len, num_blocks * engine.block_size)
    cores = _cores(engine)
    return LoadedModel(
        runner=TorchRunner(config, weights, num_blocks, engine.block_size, fused=not_fused is None, cores=cores),
        cores=cores,
        fingerprint=fingerprint(layout, weights_id(engine.model, config), _rope(config)),
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=read_generation_defaults(engine.model, raw).eos_token_ids,
        notices=(
            *dtype_notices,
            *_kernel_notices(engine, layout.dtype),
            *_length_notices(wanted_len, max_model_len, num_blocks),
        ),
    )


def _cores(engine: EngineConfig) -> CoreLease | None:
    openmp = loaded_openmp()
    if openmp is not None:
        return CoreLease(openmp, engine.num_threads)
    if engine.num_threads is not None:
        torch.set_num_threads(engine.num_threads)
    return None


def _wanted_len(engine: EngineConfig, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    if engine.max_model_len is None:
        return limit
    if engine.max_model_len > limit:
        raise ModelError(f"max_model_len {engine.max_model_len} is more than the model's {limit} positions")
    return engine.max_model_len


def _kernel_notices(engine: EngineConfig, dtype: str) -> tuple[str, ...]:
    if engine.kernels != "auto" or dtype == "float16":  # asked for, or `_FLOAT16_IS_SLOW` says it
        return ()
    reason = why_not_fused(dtype)
    return () if reason is None else (f"torch's operations are used, kernels would be faster: {reason}",)


def _length_notices(wanted_len: int, max_model_len: int, num_blocks: int) -> tuple[str, ...]:
    if max_model_len == wanted_len:
        return ()
    return (f"max_model_len lowered from {wanted_len} to {max_model_len}: the KV pool has {num_blocks} blocks",)


def _dtype(engine: EngineConfig, config: ModelConfig) -> tuple[torch.dtype, tuple[str, ...]]:
    if engine.dtype in DTYPES:
        return getattr(torch, engine.dtype), ()
    if engine.dtype != "auto":
        raise ModelError(f"dtype {engine.dtype!r} is not supported (auto, {', '.join(DTYPES)})")
    own = stored_dtype(engine.model) if config.dtype is None else getattr(torch, config.dtype)
    return own, (_FLOAT16_IS_SLOW,) if own == torch.float16 else ()


def _rope(config: ModelConfig) -> dict[str, object]:
    return {} if config.rope is None else asdict(config.rope)


def _num_blocks(engine: EngineConfig, layout: KvLayout) -> int:
    budget = kv_budget(engine.kv_memory_bytes)
    num_blocks = budget // layout.block_bytes
    if num_blocks < _MIN_BLOCKS:
        needed = _MIN_BLOCKS * layout.block_bytes
        raise ModelError(f"{budget} bytes of KV memory are too little for this model: it needs at least {needed}")
    return num_blocks


def kv_layout(config: ModelConfig, block_size: int, dtype: torch.dtype) -> KvLayout:
    """The geometry of a model's KV blocks."""
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=str(dtype).removeprefix("torch."),
    )


def _nothing(with_logprobs: bool) -> StepOutput:
    none = np.empty(0, dtype=np.float32)
    logprobs = StepLogprobs(none, np.empty((0, 0), dtype=np.int32), none.reshape(0, 0)) if with_logprobs else None
    return StepOutput(np.empty(0, dtype=np.int32), logprobs)
