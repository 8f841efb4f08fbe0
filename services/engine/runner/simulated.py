"""A stand-in for a model, exact and fast: for tests of everything around the model, and for benchmarks beside it.

It keeps a real pool of KV blocks and puts each token and its position there. The next token is a hash of what a
sequence's blocks hold, so a block that is stale, misplaced, torn or not moved changes the tokens that follow.
"""

from collections import deque

import numpy as np

from kvtransfer.layout import KvLayout
from services.engine.runner.base import StepInput, StepLogprobs, StepOutput

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class SimulatedRunner:
    """A `Runner` whose KV is the tokens themselves: K holds token ids, V their positions, as float32."""

    def __init__(self, num_blocks: int, block_size: int, *, vocab_size: int = 1000, window: int | None = None) -> None:
        self.layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype="float32")
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.window = window
        self._pool = np.zeros((num_blocks, 2, block_size), dtype=np.float32)
        self._launched: deque[StepOutput] = deque()

    def kv_bytes(self) -> np.ndarray:
        """uint8[num_blocks, block_bytes], a view."""
        return self._pool.reshape(self.num_blocks, -1).view(np.uint8)

    def launch(self, step: StepInput) -> None:
        """Writes this step's KV, then reads whole sequences back through their block tables."""
        counts = np.diff(step.query_starts)
        rows = np.repeat(np.arange(len(counts)), counts)
        block, offset = np.divmod(step.positions, self.layout.block_size)
        self._pool[step.block_tables[rows, block], 0, offset] = step.token_ids
        self._pool[step.block_tables[rows, block], 1, offset] = step.positions
        self._launched.append(self._sample(step))

    def collect(self) -> StepOutput:
        """What the oldest step sampled."""
        return self._launched.popleft()

    def _sample(self, step: StepInput) -> StepOutput:
        tables, lengths = step.block_tables[step.sample_rows], step.seq_lens[step.sample_rows]
        shape = (len(tables), tables.shape[1] * self.layout.block_size, 2)
        content = self._pool[tables].transpose(0, 1, 3, 2).reshape(shape)  # by row and position: token, position
        mixed = (content[..., 0].astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
        mixed = (mixed ^ (mixed >> np.uint64(29))) * (content[..., 1].astype(np.uint64) * np.uint64(2) + np.uint64(1))
        positions = np.arange(mixed.shape[1])
        seen = positions < lengths[:, None]
        if self.window is not None:
            seen &= positions >= lengths[:, None] - self.window
        mixed[~seen] = 0
        digest = mixed.sum(axis=1, dtype=np.uint64) * _MULTIPLIER
        tokens = ((digest >> np.uint64(33)) % np.uint64(self.vocab_size)).astype(np.int32)
        return StepOutput(self._avoid_banned(tokens, step), self._logprobs(tokens, step))

    def _avoid_banned(self, tokens: np.ndarray, step: StepInput) -> np.ndarray:
        for row, banned in step.sampling.banned.items():
            while tokens[row] in banned:
                tokens[row] = (tokens[row] + 1) % self.vocab_size
        return tokens

    def _logprobs(self, tokens: np.ndarray, step: StepInput) -> StepLogprobs | None:
        """All certainty is on the sampled token; alternatives are its successors."""
        if not step.sampling.any_logprobs:
            return None
        width = int(step.sampling.num_logprobs.max())
        ranks = np.arange(width, dtype=np.int32)
        top_ids = (tokens[:, None] + ranks) % self.vocab_size
        top = np.broadcast_to(-ranks.astype(np.float32), top_ids.shape)
        return StepLogprobs(np.zeros(len(tokens), dtype=np.float32), top_ids.astype(np.int32), top.copy())
