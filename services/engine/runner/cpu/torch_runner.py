"""Runs a model on the CPU with torch.

The KV pool is one zeroed region of memory that torch and transports share.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

import numpy as np
import torch

from kvtransfer.block_memory import HostBlocks
from services.engine.attention.base import PagedQueries
from services.engine.kernels.cpu.huge_pages import allocate
from services.engine.kernels.load import make_operations
from services.engine.models.base import ModelInput, Weights
from services.engine.models.experts import tally_experts
from services.engine.models.model_config import ModelConfig
from services.engine.models.registry import make_model
from services.engine.runner.base import (
    ScoredTokens,
    StepInput,
    StepLogprobs,
    StepOutput,
    StepTokens,
    common_width,
    spare_blocks,
    wide_rows,
)
from services.engine.runner.cpu.attention import StoredKv, make_attention
from services.engine.runner.cpu.place import Place
from services.engine.runner.cpu.sampler import sample, score
from services.engine.runner.cpu.shared_core_operations import SharedCoreOperations
from services.engine.runner.load_plan import dtype_name, kv_layout
from services.engine.runner.not_finite import rows_not_finite
from services.engine.runner.pooled import pooled_outputs

_SCORED_AT_ONCE = 256  # tokens of prompts that are scored at once


class TorchRunner:
    """`Runner` on the CPU. `launch` runs the whole step, and raises its errors.

    Where ranks share the model, each has a runner of its part. Rank 0, which has the last layers where stages share
    them, launches a step, the others follow it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        num_blocks: int,
        block_size: int,
        *,
        kv: StoredKv | None = None,
        fused: bool,
        place: Place = Place(),  # noqa: B008 -- frozen
    ) -> None:
        """Allocates the pool. kv: how KV is stored; None: in numbers of the weights' dtype.

        Where ranks share the model, `config` and `weights` are this one's; it connects the weights with the others.
        """
        place.connect(config, weights)
        self._stage, self.in_stages = place.stage, place.stage is not None
        kv = kv or StoredKv(kv_layout(config, block_size, weights.dtype))
        self.layout = kv.layout
        self.num_blocks = num_blocks
        num_slices = self.layout.num_slices if config.is_causal else 0
        self.spare_blocks = spare_blocks(num_blocks, block_size, num_slices)
        self.vocab_size = config.vocab_size
        self.embedding_size = config.embedding_size
        self.window = config.window
        self._windows = config.layer_windows
        pool_bytes = self.spare_blocks.stop * self.layout.block_bytes
        blocks = (allocate(pool_bytes) if place.pool is None else place.pool).reshape(self.spare_blocks.stop, -1)
        assert blocks.nbytes == pool_bytes, (blocks.nbytes, pool_bytes)
        self._memory = HostBlocks(blocks[:num_blocks])
        coded = kv.coded(weights.dtype)
        numbers = torch.from_numpy(blocks).view(-1).view(weights.dtype if coded is None else torch.uint8)
        pool = numbers.view(self.layout.shape(len(blocks)))
        self._cores = cores = place.cores
        self.whole_prompts = not config.is_causal
        self.token_types = config.has_token_types
        self.generates = config.generates
        self._attention = make_attention(
            pool,
            self.layout,
            config,
            weights.sinks,
            coded,
            fused=fused,
            before_layer=lambda: None if cores is None else cores.adjust(),
        )
        operations = make_operations(dtype_name(weights.dtype), fused=fused, blocks=place.blocks)
        if cores is not None:
            operations = SharedCoreOperations(operations, cores)
        self._mask = operations.mask
        self._expert_counts = tally_experts(weights)
        self.has_experts = self._expert_counts is not None
        self.experts_of_ranks: tuple[range, ...] = ()
        self._model = make_model(config, weights, self._attention, operations)
        self._done: deque[StepOutput] = deque()

    def kv_memory(self) -> HostBlocks:
        """See `Runner.kv_memory`."""
        return self._memory

    def copy_block(self, source: int, destination: int) -> None:
        """See `Runner.copy_block`."""
        blocks = self._memory.array
        blocks[destination] = blocks[source]

    def launch(self, step: StepInput) -> None:
        """Runs the step."""
        assert len(self._done) < 2, "two steps are launched and not collected"
        with self._computing(step.tokens):
            if not step.sampling.settles:
                step.sampling.begin_masks()
            with torch.inference_mode():
                self._done.append(output := self._run(step))
            if step.counts_experts and self._expert_counts is not None:
                output.expert_pairs = self._expert_counts.numpy().copy()

    def follow(self, tokens: StepTokens, parts: tuple[int, int, int, int], *, samples_all: bool) -> None:
        """Does this rank's part of a step that rank 0 launches: all sums and gathers of it, and nothing else.

        parts, samples_all: see `StepInput`.
        """
        with self._computing(tokens), torch.inference_mode():
            if samples_all and self._stage is None:
                self._model.all_logits(self._input(tokens))
                return
            if (hidden := self._forward(tokens)) is None:
                return
            sampled, scored, _pooled, _watched = hidden.split(parts)
            if len(sampled):
                self._model.logits(sampled)
            for some in scored.split(_SCORED_AT_ONCE) if len(scored) else ():
                self._model.logits(some)

    @contextmanager
    def _computing(self, tokens: StepTokens) -> Iterator[None]:
        """Takes this runner's share of the cores for a step."""
        if self._cores is None:
            yield
            return
        self._cores.begin(prompts=tokens.computes_prompts)
        try:
            yield
        finally:
            self._cores.end()

    def collect(self) -> StepOutput:
        """Returns the output of the oldest step that was not collected."""
        return self._done.popleft()

    def _run(self, step: StepInput) -> StepOutput:
        if step.samples_all and self._stage is None:
            tokens = self._input(step.tokens)
            _on_computing(step)
            output = sample(self._model.all_logits(tokens), step.sampling, self._mask)
            output.not_finite = rows_not_finite(step, output)
            return output
        hidden = self._forward(step.tokens, partial(_on_computing, step))
        assert hidden is not None, "rank 0 has the last layers"
        sampled, scored, pooled, watched = hidden.split(step.parts)
        if len(sampled):
            output = sample(self._model.logits(sampled), step.sampling, self._mask)
        else:
            output = _nothing(step.sampling.any_logprobs)
        if step.scored is not None:
            output.scored = self._score(scored, step.scored)
        if step.pooled is not None:
            output.pooled = pooled_outputs(pooled, step.pooled, self._model.head).numpy()
        output.not_finite = rows_not_finite(step, output, watched.isfinite().all(dim=1).numpy())
        return output

    def _forward(self, tokens: StepTokens, on_computing: Callable[[], None] = lambda: None) -> torch.Tensor | None:
        """Returns the hidden states of the step's queries, [Q, width]; None: a later stage has them. on_computing:
        called when most of what needs Python is done.
        """
        if self._stage is None:
            step = self._input(tokens)
            on_computing()
            return self._model.forward(step)
        on_computing()
        return self._stage.run(tokens, lambda piece, hidden: self._model.forward(self._input(piece, hidden)))

    def _input(self, tokens: StepTokens, hidden: torch.Tensor | None = None) -> ModelInput:
        """Makes the input of the forward pass. hidden: see `ModelInput`."""
        is_last = self._stage is None or self._stage.is_last
        queries = PagedQueries(tokens.query_starts, tokens.seq_lens, tokens.block_tables)
        return ModelInput(
            token_ids=torch.from_numpy(tokens.token_ids).to(torch.int64),
            positions=torch.from_numpy(tokens.positions),
            row_starts=torch.from_numpy(tokens.query_starts),
            plan=self._attention.prepare(queries, self._windows),
            queries=torch.from_numpy(tokens.queries) if is_last else None,
            token_types=torch.from_numpy(tokens.token_types) if len(tokens.token_types) else None,
            hidden=hidden,
        )

    def _score(self, hidden: torch.Tensor, scored: ScoredTokens) -> StepLogprobs:
        """Scores a few tokens at a time: the logits of a whole chunk would take as much memory as a model."""
        width = common_width(scored.num_logprobs)
        parts = []
        for start, some in zip(count(0, _SCORED_AT_ONCE), hidden.split(_SCORED_AT_ONCE), strict=False):
            here = slice(start, start + len(some))
            wide = wide_rows(scored.num_logprobs[here])
            parts.append(score(self._model.logits(some), scored.successors[here], width, wide))
        return StepLogprobs.joined(parts)


def _on_computing(step: StepInput) -> None:
    """Says that most of what a step needs Python for is done."""
    if step.on_computing is not None:
        step.on_computing()


def _nothing(with_logprobs: bool) -> StepOutput:
    none = np.empty(0, dtype=np.float32)
    logprobs = StepLogprobs(none, np.empty((0, 0), dtype=np.int32), none.reshape(0, 0)) if with_logprobs else None
    return StepOutput(np.empty(0, dtype=np.int32), logprobs)
