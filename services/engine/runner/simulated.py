"""A stand-in for a model, exact and fast: for tests of everything around the model, and for benchmarks.

It keeps a real pool of KV blocks and stores each token and its position there. The next token is a hash of the content
of a sequence's blocks, so a block that is stale, misplaced, torn or not moved changes the tokens that follow. With
groups of layers that is true of each slice, as far as the window of its group reaches.
"""

from collections import deque
from dataclasses import replace
from itertools import pairwise

import numpy as np

from kvtransfer.block_memory import BlockMemory, HostBlocks
from kvtransfer.layer_groups import LayerGroups
from kvtransfer.layout import KvLayout
from services.engine.runner.base import (
    NOT_FINITE,
    LogitEdits,
    SamplingBatch,
    StepInput,
    StepLogprobs,
    StepOutput,
    StepTokens,
    common_width,
    spare_blocks,
    wide_rows,
)
from services.engine.runner.not_finite import rows_not_finite

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
SLICE_APART = 1 << 16  # the positions that a slice stores are so much higher than those of the slice before


class SimulatedRunner:
    """A `Runner` whose KV is the tokens themselves: K holds token ids, V their positions, as float32.

    With `late`, a step runs as late as possible: when it is collected, or when a block is copied after it. nan_token:
    a token whose embedding is NaN, so that nothing is finite that is computed of it or after it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 1000,
        window: int | None = None,
        late: bool = False,
        nan_token: int | None = None,
        groups: LayerGroups | None = None,
    ) -> None:
        """groups: then num_blocks are slices, and there is no `window`."""
        self.layout = KvLayout(
            num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype="float32", groups=groups
        )
        self._windows = (window,)  # of each slice
        if groups is not None:
            self._windows = tuple(np.repeat(np.array(groups.windows, dtype=object), groups.sizes).tolist())
        self.num_blocks = num_blocks
        self.spare_blocks = spare_blocks(num_blocks, block_size, len(self._windows))
        self.whole_prompts = False
        self.token_types = False
        self.generates = True
        self.has_experts = False
        self.experts_of_ranks: tuple[range, ...] = ()
        self.vocab_size = vocab_size
        self.embedding_size = 2
        self.window = window
        self._pool = np.zeros((self.spare_blocks.stop, 2, block_size), dtype=np.float32)
        self._memory: BlockMemory = HostBlocks(self._pool[:num_blocks].reshape(num_blocks, -1).view(np.uint8))
        self.nan_token = nan_token
        self._late = late
        self._launched: deque[StepInput] = deque()  # steps that did not run yet
        self._ran: deque[StepOutput] = deque()
        self._sampled = np.zeros(0, dtype=np.int32)  # by the last step that ran

    def kv_memory(self) -> BlockMemory:
        """See `Runner.kv_memory`."""
        return self._memory

    def copy_block(self, source: int, destination: int) -> None:
        """See `Runner.copy_block`."""
        while self._launched:
            self._run()
        self._pool[destination] = self._pool[source]

    def launch(self, step: StepInput) -> None:
        """See `Runner.launch`."""
        self._launched.append(step)
        if step.on_computing is not None:
            step.on_computing()
        if not self._late:
            self._run()

    def collect(self) -> StepOutput:
        """Returns the output of the oldest step."""
        if not self._ran:
            self._run()
        return self._ran.popleft()

    def _run(self) -> None:
        output = self._compute(self._launched.popleft())
        self._ran.append(output)
        self._sampled = output.token_ids

    def _compute(self, step: StepInput) -> StepOutput:
        """Writes this step's KV, then reads whole sequences back through their block tables."""
        token_ids, positions = self._known(step.tokens.token_ids), step.tokens.positions
        counts = np.diff(step.tokens.query_starts)
        rows = np.repeat(np.arange(len(counts)), counts)
        block, offset = np.divmod(positions, self.layout.block_size)
        for number, tables in enumerate(self._tables_of_slices(step.tokens.block_tables)):
            self._pool[tables[rows, block], 0, offset] = token_ids
            self._pool[tables[rows, block], 1, offset] = positions + number * SLICE_APART
        tokens = self._followers(step.tokens, step.sampled)
        tokens = self._moved_by_chance(tokens, step.sampling)
        if step.sampling.settles:
            self._settle(tokens, step.sampling.edits)
        elif step.sampling.edits is not None:
            tokens = self._edited(tokens, step.sampling.edits)
        output = StepOutput(tokens, self._logprobs(tokens, step), self._score(step), self._pooled(step))
        if self.nan_token is not None:
            self._spoil(output, step, self.nan_token)
        return output

    def _known(self, token_ids: np.ndarray) -> np.ndarray:
        """Puts the tokens of the step before in their places."""
        carried = token_ids < 0
        known = token_ids.copy()
        known[carried] = np.maximum(self._sampled[-1 - token_ids[carried]], 0)
        return known

    def _spoil(self, output: StepOutput, step: StepInput, nan_token: int) -> None:
        """Puts NaN, and NOT_FINITE for tokens, where the NaN token is seen."""

        def spoilt(queries: np.ndarray) -> np.ndarray:
            rows = step.tokens.rows_of(queries)
            anywhere = np.zeros(len(queries), dtype=np.bool_)
            for tables, window in zip(
                self._tables_of_slices(step.tokens.block_tables[rows]), self._windows, strict=True
            ):
                tokens = self._content(tables)[..., 0]
                found = (tokens == nan_token) & _seen(tokens.shape[1], step.tokens.positions[queries], window)
                anywhere |= found.any(axis=1)
            return anywhere

        output.token_ids[spoilt(step.sampled)] = NOT_FINITE
        if step.scored is not None and output.scored is not None:
            output.scored.sampled[spoilt(step.scored.queries)] = np.nan
        if step.pooled is not None and output.pooled is not None:
            for index, (start, end) in enumerate(pairwise(step.pooled.starts.tolist())):
                if spoilt(step.pooled.queries[start:end]).any():
                    output.pooled[index] = np.nan
        output.not_finite = rows_not_finite(step, output, ~spoilt(step.watched))

    def _followers(self, step: StepTokens, queries: np.ndarray) -> np.ndarray:
        """Returns the tokens that follow these query tokens, int32[N]."""
        digest = np.zeros(len(queries), dtype=np.uint64)
        tables_of_slices = self._tables_of_slices(step.block_tables[step.rows_of(queries)])
        for tables, window in zip(tables_of_slices, self._windows, strict=True):
            content = self._content(tables)
            mixed = (content[..., 0].astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
            places = content[..., 1].astype(np.uint64) * np.uint64(2) + np.uint64(1)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * places
            mixed[~_seen(mixed.shape[1], step.positions[queries], window)] = 0
            digest += mixed.sum(axis=1, dtype=np.uint64)
        digest *= _MULTIPLIER
        followers: np.ndarray = ((digest >> np.uint64(33)) % np.uint64(self.vocab_size)).astype(np.int32)
        return followers

    def _tables_of_slices(self, tables: np.ndarray) -> list[np.ndarray]:
        """Returns the block table of each slice, of int32[N, S * B] tables."""
        return np.split(tables, len(self._windows), axis=1)

    def _content(self, tables: np.ndarray) -> np.ndarray:
        """Returns token and position at each place of the sequences with these tables, float32[N, places, 2]."""
        shape = (len(tables), tables.shape[1] * self.layout.block_size, 2)
        content: np.ndarray = self._pool[tables].transpose(0, 1, 3, 2).reshape(shape)
        return content

    def _moved_by_chance(self, tokens: np.ndarray, sampling: SamplingBatch) -> np.ndarray:
        """Moves tokens of rows with a temperature by a function of seed and position."""
        digest = (sampling.seed + sampling.position.astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
        moved = tokens + (digest >> np.uint64(33)) % np.uint64(self.vocab_size)
        chosen: np.ndarray = np.where(sampling.temperature > 0, moved % self.vocab_size, tokens).astype(np.int32)
        return chosen

    def _settle(self, tokens: np.ndarray, edits: LogitEdits | None) -> None:
        """Puts tokens that their rows may choose in the place of those that they must not, as the CPU's sampler."""
        assert edits is not None
        assert edits.masks is not None
        assert edits.masks.settle is not None
        rows = edits.masks.rows
        settled = tokens[rows]
        refused = edits.masks.settle(settled)
        tokens[rows] = settled
        if refused is not None:
            tokens[refused.rows] = self._edited(tokens, replace(edits, masks=refused))[refused.rows]

    def _edited(self, tokens: np.ndarray, edits: LogitEdits) -> np.ndarray:
        """Applies edits to logits that are 0 for the hash's token and one less for each token after it, around the
        vocabulary.
        """
        logits = -((np.arange(self.vocab_size) - tokens[:, None]) % self.vocab_size).astype(np.float32)
        np.add.at(logits, (edits.bias_rows, edits.bias_tokens), edits.bias)
        rows, counts = edits.count_rows, edits.counts
        values = logits[rows, edits.count_tokens]
        values = np.where(values > 0, values / edits.repetition[rows], values * edits.repetition[rows])
        values -= edits.frequency[rows] * counts + edits.presence[rows] * (counts > 0)
        logits[rows, edits.count_tokens] = values
        if edits.masks is not None:
            bits = edits.masks.bits().view(np.uint8)
            allowed = np.unpackbits(bits, axis=1, count=self.vocab_size, bitorder="little").view(np.bool_)
            masked = logits[edits.masks.rows].clip(min=np.finfo(np.float32).min)
            logits[edits.masks.rows] = np.where(allowed, masked, -np.inf)
        chosen: np.ndarray = logits.argmax(axis=1).astype(np.int32)
        return chosen

    def _logprobs(self, tokens: np.ndarray, step: StepInput) -> StepLogprobs | None:
        """Returns logprobs in which all certainty is on the sampled token; alternatives are its successors."""
        if not step.sampling.any_logprobs:
            return None
        found = self._spread(tokens, tokens, step.sampling.num_logprobs)
        if (named := step.sampling.named) is not None:
            ids = named.token_ids.astype(np.int32)
            found.top_ids[named.rows, : ids.shape[1]] = ids
            found.top[named.rows, : ids.shape[1]] = -((ids - tokens[named.rows, None]) % self.vocab_size)
        return found

    def _score(self, step: StepInput) -> StepLogprobs | None:
        scored = step.scored
        if scored is None:
            return None
        expected = self._followers(step.tokens, scored.queries)
        found = self._spread(expected, scored.successors, scored.num_logprobs)
        found.ranks = (1 - found.sampled).astype(np.int32)
        return found

    def _pooled(self, step: StepInput) -> np.ndarray | None:
        """Returns sums of hidden states, of which each is the token that follows a token, and the token's position."""
        pooled = step.pooled
        if pooled is None:
            return None
        positions = step.tokens.positions[pooled.queries]
        hidden = np.stack([self._followers(step.tokens, pooled.queries), positions], axis=1).astype(np.float32)
        sums = [hidden[start:end].sum(axis=0) for start, end in pairwise(pooled.starts.tolist())]
        return np.stack(sums)

    def _spread(self, expected: np.ndarray, tokens: np.ndarray, widths: np.ndarray) -> StepLogprobs:
        """Returns logprobs of `tokens`: `expected` ones have 0, and each one after them, around the vocabulary, one
        less.
        """
        ids, top = self._best(expected[:, None], common_width(widths))
        sampled = -((tokens - expected) % self.vocab_size).astype(np.float32)
        wide = {row: self._best(expected[row], width) for row, width in wide_rows(widths)}
        return StepLogprobs(sampled, ids, np.broadcast_to(top, ids.shape).copy(), wide=wide)

    def _best(self, expected: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the best tokens, of which the first is expected, and their logprobs: int32[..., K], float32[K]."""
        places = np.arange(min(width, self.vocab_size), dtype=np.int32)
        ids: np.ndarray = ((expected + places) % self.vocab_size).astype(np.int32)
        return ids, -places.astype(np.float32)


def _seen(num_places: int, positions: np.ndarray, window: int | None) -> np.ndarray:
    """Returns which places a token at each of these positions sees, bool[N, places]."""
    everywhere, last = np.arange(num_places), positions[:, None]
    seen: np.ndarray = everywhere <= last
    return seen if window is None else seen & (everywhere > last - window)
