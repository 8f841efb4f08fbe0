"""Runs a model on a GPU, one step ahead of the host.

A step is one copy to the device, its kernels, and a copy of the sampled ids back, which no thread awaits before the
step is collected. Tokens that the previous step samples do not travel by way of the host: kernels read them where the
previous step wrote them.

Steps in which every row decodes are replayed. For some numbers of rows (buckets), all kernels from the token ids to the
logits are recorded once (a CUDA graph) and replayed with other data in the same places. A step with fewer rows than its
bucket has rows of padding, which write no KV.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries
from services.engine.attention.triton_attention import WorkCut
from services.engine.kernels.gpu.operations import TritonOperations
from services.engine.kernels.gpu.rows import fill_tokens
from services.engine.models.base import ModelInput, Weights
from services.engine.models.experts import tally_experts
from services.engine.models.kv_scales import KvScales
from services.engine.models.model_config import ModelConfig
from services.engine.models.registry import make_model
from services.engine.runner.base import (
    NO_ROWS,
    LogitEdits,
    PooledTokens,
    SamplingBatch,
    ScoredTokens,
    StepInput,
    StepLogprobs,
    StepOutput,
    StepTokens,
    common_width,
    spare_blocks,
    wide_rows,
)
from services.engine.runner.gpu.attention import make_attention
from services.engine.runner.gpu.device import Device, Fetched, Recorded
from services.engine.runner.gpu.device_blocks import DeviceBlocks
from services.engine.runner.gpu.sampler import GpuSampler, Wanted, read_logprobs, score
from services.engine.runner.gpu.step_buffer import StepBuffer
from services.engine.runner.not_finite import rows_not_finite
from services.engine.runner.pooled import pooled_outputs

_SCORED_AT_ONCE = 256  # tokens of prompts that are scored at once
_TOKEN_BYTES = 64  # staged for a prompt's token: id, position, slot, entry, index, and edits of logits
_ROW_BYTES = 512  # staged for a row, blocks aside: parameters of sampling, edits of logits, alignment


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The sizes of the largest step, and the options of attention."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    split_keys: int | None = None  # see `WorkCut`
    share_prefixes: bool = True  # see `WorkCut`

    def buckets(self) -> list[int]:
        """Returns the numbers of rows for which steps are recorded, rising. Beyond 8, padding is at most a quarter of a
        step.
        """
        sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, self.max_num_seqs, 32)]
        return [size for size in sizes if size < self.max_num_seqs] + [self.max_num_seqs]


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """A step under way. It fetches ids, logprobs if any are wanted and those of each part of the scored tokens (see
    `read_logprobs`), sums of hidden states if any are pooled, and which watched queries are finite if any are watched.
    """

    step: StepInput
    fetched: Fetched


class GpuRunner:
    """`Runner` over a pool of KV blocks on a device. Its engine's pipeline may be one step deep."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        pool: Tensor,
        layout: KvLayout,
        device: Device,
        limits: StepLimits,
        *,
        kv_scales: KvScales | None = None,
    ) -> None:
        """pool: uint8[num_blocks and spare ones, block_bytes]. kv_scales: present if the layout's dtype is
        float8_e4m3fn.
        """
        self.layout = layout
        self.num_blocks = len(pool) - len(spare_blocks(0, layout.block_size))
        self.spare_blocks = spare_blocks(self.num_blocks, layout.block_size)
        self.whole_prompts = False
        self.token_types = False
        self.generates = config.generates
        self.vocab_size = config.vocab_size
        self.embedding_size = config.embedding_size
        self.window = config.window
        self._windows = config.layer_windows
        self._limits = limits
        self._pool = pool
        self._blocks = DeviceBlocks(pool[: self.num_blocks])
        self._device = device
        self._buffer = StepBuffer(device)
        self._attention = make_attention(
            pool.view(-1).view(getattr(torch, layout.dtype)).view(layout.shape(len(pool))),
            layout,
            (config, weights),
            kv_scales,
            staging=self._buffer,
            cut=WorkCut(device.num_multiprocessors, limits.split_keys, limits.share_prefixes),
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        self._model = make_model(config, weights, self._attention, TritonOperations())
        self._num_tokens = torch.zeros(1, dtype=torch.int32, device=device.torch)  # of the step, without padding
        self._expert_counts = tally_experts(weights, self._num_tokens)
        self.has_experts = self._expert_counts is not None
        self.experts_of_ranks: tuple[range, ...] = ()
        self._sampler = GpuSampler(device, max(limits.max_num_seqs, limits.max_num_batched_tokens))
        self._buckets = np.array(limits.buckets())
        self._recorder = device.recorder()
        # Where rows start, if each has one token.
        self._one_each = torch.arange(limits.max_num_seqs + 1, device=device.torch)
        self._recorded: dict[int, Recorded] = {}
        self._reserve_buffer()
        self._last: Fetched | None = None
        self._under_way: deque[_Launched] = deque()

    def kv_memory(self) -> DeviceBlocks:
        """See `Runner.kv_memory`."""
        return self._blocks

    def copy_block(self, source: int, destination: int) -> None:
        """See `Runner.copy_block`."""
        self._device.bind_thread()
        self._pool[destination].copy_(self._pool[source])
        self._device.mark().wait()

    def launch(self, step: StepInput) -> None:
        """Starts a step. `collect` raises the device's errors."""
        assert len(self._under_way) < 2, "two steps are launched and not collected"
        self._device.bind_thread()
        with torch.inference_mode():
            self._under_way.append(self._launch(step))
        if step.on_computing is not None:
            step.on_computing()

    def collect(self) -> StepOutput:
        """See `Runner.collect`."""
        launched = self._under_way.popleft()
        step = launched.step
        token_ids, *rest = launched.fetched.arrays()
        expert_pairs = rest.pop() if step.counts_experts else None
        watched = rest.pop() if len(step.watched) else None
        pooled = None if step.pooled is None else rest.pop()
        logprobs, parts = None, []
        if step.sampling.any_logprobs:
            logprobs = read_logprobs(rest, step.sampling.num_logprobs, ranked=False)
        if step.scored is not None:
            parts = [read_logprobs(rest, widths, ranked=True) for widths in _scored_widths(step.scored)]
        output = StepOutput(token_ids, logprobs, StepLogprobs.joined(parts) if parts else None, pooled)
        output.not_finite = rows_not_finite(step, output, watched)
        output.expert_pairs = expert_pairs
        return output

    def warm_up(self) -> None:
        """Runs a step of each kind, which compiles kernels and records steps. Overwrites KV of block 0."""
        self.run_largest()
        if not self.generates:
            return
        for bucket in reversed(self._buckets.tolist()):
            self._try(np.ones(bucket, dtype=np.int32), SamplingBatch.greedy(bucket))
        for sampling in _kinds_of_sampling(1):
            self._try(np.ones(1, dtype=np.int32), sampling)

    def run_largest(self) -> None:
        """Runs the steps that take the most memory: one with the most tokens, and one with the most rows."""
        full, rest = divmod(self._limits.max_num_batched_tokens, self._limits.max_model_len)
        counts = [self._limits.max_model_len] * full + ([rest] if rest else [])
        counts = counts[: self._limits.max_num_seqs]
        self._try(np.array(counts, dtype=np.int32), SamplingBatch.greedy(len(counts)))
        rows = self._limits.max_num_seqs
        *_, last = _kinds_of_sampling(rows)
        self._try(np.ones(rows, dtype=np.int32), last)

    def _launch(self, step: StepInput) -> _Launched:
        step.sampling.begin_masks()
        num_rows = len(step.tokens.seq_lens)
        each_gets_one = np.array_equal(step.sampled, np.arange(num_rows))
        if self._expert_counts is not None:
            self._num_tokens.fill_(len(step.tokens.token_ids))
        if len(step.tokens.token_ids) == num_rows and each_gets_one and step.scored is None:
            logits, wanted, others = self._decode(step, num_rows)
        else:
            logits, wanted, others = self._compute(step)
        if self._last is not None:
            self._last.hold_back()
        sampled = self._sampler.sample(logits, wanted)
        if step.counts_experts and self._expert_counts is not None:
            others.append(self._expert_counts.clone())  # the next step counts on before this one's copy is done
        self._last = self._device.fetch([*sampled, *others])
        return _Launched(step, self._last)

    def _decode(self, step: StepInput, num_rows: int) -> tuple[Tensor, Wanted, list[Tensor]]:
        """Computes one token of each row, by the recording for so many rows or a few more."""
        tokens, bucket = step.tokens, int(self._buckets[np.searchsorted(self._buckets, num_rows)])
        self._buffer.begin()
        ids = self._buffer.put(_padded(tokens.token_ids, bucket), fixed=True)
        positions = self._buffer.put(_padded(tokens.positions, bucket), fixed=True)
        plan = self._attention.prepare_recorded(_queries(tokens), bucket, self._windows)
        wanted = self._sampler.stage(step.sampling, self._buffer)
        self._buffer.copy()
        if bucket not in self._recorded:
            padded = ModelInput(ids, positions, self._one_each[: bucket + 1], plan, queries=None)
            self._recorded[bucket] = self._recorder.record(lambda: self._hidden(padded))
        self._recorded[bucket].replay()
        return self._model.logits(self._recorded[bucket].output[:num_rows]), wanted, []

    def _hidden(self, staged: ModelInput) -> Tensor:
        """Computes the hidden states of a step whose token ids are those of `StepTokens`.

        Logits are not recorded with it: each bucket would keep its own.
        """
        return self._model.forward(replace(staged, token_ids=fill_tokens(staged.token_ids, self._sampler.sampled)))

    def _reserve_buffer(self) -> None:
        """Reserves room for the largest step. Edits of more logits than there are tokens travel on their own."""
        limits = self._limits
        tokens, rows = limits.max_num_batched_tokens, limits.max_num_seqs
        decode = 8 * rows + self._attention.staged_bytes(rows, limits.max_model_len, self._windows)
        self._buffer.reserve(decode + _TOKEN_BYTES * tokens + _ROW_BYTES * rows)

    def _compute(self, step: StepInput) -> tuple[Tensor, Wanted, list[Tensor]]:
        """Computes any step. Returns the logits of the tokens to sample, and what else is fetched of the step: the
        scores of tokens to be scored, sums of hidden states, and which watched queries are finite.
        """
        buffer, tokens = self._buffer, step.tokens
        buffer.begin()
        ids, positions = buffer.put(tokens.token_ids), buffer.put(tokens.positions)
        starts, queries = buffer.put(tokens.query_starts), buffer.put(tokens.queries)
        successors = None if step.scored is None else buffer.put(step.scored.successors)
        plan = self._attention.prepare(_queries(tokens), self._windows)
        wanted = self._sampler.stage(step.sampling, buffer)
        buffer.copy()
        hidden = self._hidden(ModelInput(ids, positions, starts, plan, queries))
        sampled, scored, pooled, watched = hidden.split(step.parts)
        others = [] if step.scored is None else self._score(scored, successors, step.scored)
        if step.pooled is not None:
            others.append(pooled_outputs(pooled, step.pooled, self._model.head))
        if len(watched):
            others.append(watched.isfinite().all(dim=1))
        logits = self._model.logits(sampled) if self.generates else hidden.new_empty(0, 1)
        return logits, wanted, others

    def _score(self, hidden: Tensor, successors: Tensor, scored: ScoredTokens) -> list[Tensor]:
        """Scores a few tokens at a time: the logits of a whole chunk would take as much memory as a model."""
        width = common_width(scored.num_logprobs)
        found: list[Tensor] = []
        split = zip(hidden.split(_SCORED_AT_ONCE), successors.split(_SCORED_AT_ONCE), strict=True)
        for (some, tokens), widths in zip(split, _scored_widths(scored), strict=True):
            found += score(self._model.logits(some), tokens, width, wide_rows(widths))
        return found

    def _try(self, counts: np.ndarray, sampling: SamplingBatch) -> None:
        """Runs a step that computes so many tokens of each row, all in block 0, and samples one for each. For a model
        that generates nothing, the last of each is pooled.
        """
        num_rows, starts = len(counts), np.zeros(len(counts) + 1, dtype=np.int32)
        num_blocks = -(-int(counts.max()) // self.layout.block_size)
        np.cumsum(counts, out=starts[1:])
        tokens = StepTokens(
            token_ids=np.zeros(starts[-1], dtype=np.int32),
            positions=np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], counts),
            query_starts=starts,
            seq_lens=counts,
            block_tables=np.zeros((num_rows, num_blocks * self.layout.num_slices), dtype=np.int32),
        )
        last = starts[1:].astype(np.int64) - 1
        if self.generates:
            self.launch(StepInput.of(tokens, last, sampling))
        else:
            pooled = PooledTokens(last, np.arange(num_rows + 1))
            self.launch(StepInput.of(tokens, NO_ROWS, SamplingBatch.greedy(0), pooled=pooled))
        self.collect()


def _scored_widths(scored: ScoredTokens) -> list[np.ndarray]:
    """Returns the numbers of alternatives of the tokens that are scored at once, for each part of them."""
    starts = range(0, len(scored.num_logprobs), _SCORED_AT_ONCE)
    return [scored.num_logprobs[start : start + _SCORED_AT_ONCE] for start in starts]


def _queries(tokens: StepTokens) -> PagedQueries:
    return PagedQueries(tokens.query_starts, tokens.seq_lens, tokens.block_tables)


def _padded(array: np.ndarray, size: int) -> np.ndarray:
    padded = np.zeros(size, dtype=array.dtype)
    padded[: len(array)] = array
    return padded


def _kinds_of_sampling(num_rows: int) -> Iterator[SamplingBatch]:
    """Yields every kind of sampling that has kernels of its own. The last one takes the most memory."""
    one, zero = np.ones(num_rows, dtype=np.float32), np.zeros(num_rows, dtype=np.float32)
    rows, tokens = np.arange(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    edits = LogitEdits(rows, tokens, zero, rows, tokens, one, one, zero, zero)
    greedy = SamplingBatch.greedy(num_rows, num_logprobs=1)
    drawn = replace(greedy, temperature=one, all_greedy=False)
    for kind in (greedy, drawn, replace(drawn, top_p=one / 2)):
        yield kind
        yield replace(kind, edits=edits)
