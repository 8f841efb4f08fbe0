"""The self-check of a runner: a known prompt, in which it must find the same numbers whenever it is asked.

It is asked at start, twice, and after each step in which something was not finite. Then it shows which of both is at
fault: the request, or the engine. The prompt is long enough for the kernels of many tokens, and its last tokens come
one by one, as in decoding. All KV of it is in the runner's spare blocks, so nothing else is touched.
"""

from itertools import pairwise

import numpy as np

from services.engine.runner.base import (
    CHECK_TOKENS,
    NO_ROWS,
    NamedLogprobs,
    PooledTokens,
    Runner,
    SamplingBatch,
    ScoredTokens,
    StepInput,
    StepTokens,
)

_NUM_DECODED = 4  # of the tokens that are computed, one by one
_SCORED_EVERY = 8  # tokens
_PROMPTS = 3  # that are tried: one of a prompt's tokens may be the only one whose weights are damaged
_MOST_APART = 0.02  # log-probabilities, and this share of them: threads may add up in another order


class SelfCheckError(Exception):
    """A runner does not compute what it must: one line for a person."""


class SelfCheck:
    """The self-check of one runner, which no step may be using meanwhile."""

    def __init__(self, runner: Runner, max_model_len: int) -> None:
        self._runner = runner
        self._length = min(CHECK_TOKENS, max_model_len)
        self._known: np.ndarray | None = None  # log-probabilities, float32[n]

    def learn(self) -> None:
        """Finds a prompt for which all is finite, and notes the numbers. Raises SelfCheckError.

        A runner without spare blocks is not checked, unless it needs none.
        """
        if not self._runner.spare_blocks and not self._runner.whole_prompts:
            return
        for seed in range(_PROMPTS):
            random = np.random.default_rng(seed)
            # The last one is not computed: its log-probability is asked for.
            self._tokens = random.integers(0, self._runner.vocab_size, self._length + 1, np.int32)
            known = self._compute()
            if np.isfinite(known).all():
                self._known = known
                self.repeat()
                return
        raise SelfCheckError(
            "the model computes numbers that are not finite, whatever the prompt: "
            "its weights are damaged, or they are too large for the dtype"
        )

    def repeat(self) -> None:
        """Computes what was learned again, if anything was. Raises SelfCheckError if other numbers come."""
        if self._known is None:
            return
        if not np.allclose(self._compute(), self._known, rtol=_MOST_APART, atol=_MOST_APART):
            raise SelfCheckError("the self-check failed: a known prompt does not give the numbers that it gave before")

    def _compute(self) -> np.ndarray:
        """Returns log-probabilities of tokens that follow in the prompt, float32[n]; NaN where something is not
        finite. Of a model that generates nothing it returns the prompt's embedding or score, by the mean.
        """
        if not self._runner.generates:
            return self._pool()
        first_decoded = max(1, self._length - _NUM_DECODED)
        borders = [0, *range(first_decoded, self._length + 1)]
        parts = [self._run(start, end) for start, end in pairwise(borders)]
        return np.concatenate(parts)

    def _pool(self) -> np.ndarray:
        """Runs a step that pools all of the prompt."""
        length, one = self._length, np.ones(1, dtype=np.int32)
        step = StepTokens(
            token_ids=self._tokens[:length],
            positions=np.arange(length, dtype=np.int32),
            query_starts=np.array([0, length], dtype=np.int32),
            seq_lens=length * one,
            block_tables=np.array([self._runner.spare_blocks], dtype=np.int32),
        )
        pooled = PooledTokens(np.arange(length), np.array([0, length]))
        self._runner.launch(StepInput.of(step, NO_ROWS, SamplingBatch.greedy(0), pooled=pooled))
        sums = self._runner.collect().pooled
        assert sums is not None
        mean: np.ndarray = sums[0] / np.float32(length)
        return mean

    def _run(self, start: int, end: int) -> np.ndarray:
        """Runs the step that computes the tokens from `start` to `end`."""
        runner, tokens, one = self._runner, self._tokens, np.ones(1, dtype=np.int32)
        sampling = SamplingBatch.greedy(1, num_logprobs=1)
        sampling.named = NamedLogprobs(np.zeros(1, dtype=np.int64), tokens[None, end : end + 1].astype(np.int64))
        queries = np.arange(0, end - start - 1, _SCORED_EVERY)
        scored = ScoredTokens(queries, tokens[start + queries + 1], np.zeros(len(queries), dtype=np.int32))
        step = StepTokens(
            token_ids=tokens[start:end],
            positions=np.arange(start, end, dtype=np.int32),
            query_starts=np.array([0, end - start], dtype=np.int32),
            seq_lens=end * one,
            block_tables=np.array([runner.spare_blocks], dtype=np.int32),
        )
        last = np.array([end - start - 1], dtype=np.int64)
        runner.launch(StepInput.of(step, last, sampling, scored if len(queries) else None))
        output = runner.collect()
        assert output.logprobs is not None
        numbers = [output.logprobs.top[0, :1], *([] if output.scored is None else [output.scored.sampled])]
        return np.concatenate(numbers) if not len(output.not_finite) else np.full(1 + len(queries), np.nan, np.float32)
