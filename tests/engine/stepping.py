"""A minimal step loop that drives a runner directly: prefill in chunks, then decode, over scattered block tables."""

from dataclasses import dataclass, field

import numpy as np

from services.engine.runner.base import Runner, SamplingBatch, StepInput, StepTokens


@dataclass
class Row:
    """A sequence that a test runs."""

    tokens: list[int]
    blocks: np.ndarray  # int32; with slices int32[S, B]
    num_prompt: int = 0
    computed: int = 0
    logprobs: list[tuple[float, list[int], list[float]]] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]


def run_greedy(
    runner: Runner, prompts: list[list[int]], max_tokens: int, chunk: int, num_logprobs: int = -1, seed: int = 0
) -> list[Row]:
    """Greedy continuations. Prompts go in by `chunk` tokens, beside rows that decode already."""
    size = runner.layout.block_size
    num_slices = runner.layout.num_slices
    free = np.random.default_rng(seed).permutation(runner.num_blocks).astype(np.int32)
    rows: list[Row] = []
    for prompt in prompts:
        needed = -(-(len(prompt) + max_tokens) // size) * num_slices
        blocks = free[:needed] if num_slices == 1 else free[:needed].reshape(num_slices, -1)
        rows.append(Row(tokens=list(prompt), blocks=blocks, num_prompt=len(prompt)))
        free = free[needed:]
    while active := [row for row in rows if len(row.generated) < max_tokens]:
        step(runner, active, chunk, num_logprobs)
    return rows


def step(runner: Runner, rows: list[Row], chunk: int, num_logprobs: int = -1) -> None:
    """One step: up to `chunk` tokens of each row; rows whose last known token was computed get the next."""
    counts = [min(chunk, len(row.tokens) - row.computed) for row in rows]
    ends = [row.computed + count for row, count in zip(rows, counts, strict=True)]
    sampled = [index for index, row in enumerate(rows) if ends[index] == len(row.tokens)]
    num_slices, num_blocks = runner.layout.num_slices, max(row.blocks.shape[-1] for row in rows)
    tables = np.zeros((len(rows), num_slices, num_blocks), np.int32)
    for index, row in enumerate(rows):
        tables[index, :, : row.blocks.shape[-1]] = row.blocks
    starts = np.cumsum([0, *counts], dtype=np.int32)
    tokens = StepTokens(
        token_ids=_packed([row.tokens[row.computed : end] for row, end in zip(rows, ends, strict=True)]),
        positions=_packed([list(range(row.computed, end)) for row, end in zip(rows, ends, strict=True)]),
        query_starts=starts,
        seq_lens=np.array(ends, np.int32),
        block_tables=tables.reshape(len(rows), -1),
    )
    queries = starts[1:][sampled].astype(np.int64) - 1
    runner.launch(StepInput.of(tokens, queries, SamplingBatch.greedy(len(sampled), num_logprobs)))
    output = runner.collect()
    for row, end in zip(rows, ends, strict=True):
        row.computed = end
    for at, index in enumerate(sampled):
        rows[index].tokens.append(int(output.token_ids[at]))
        if output.logprobs is not None:
            found = output.logprobs
            rows[index].logprobs.append((float(found.sampled[at]), found.top_ids[at].tolist(), found.top[at].tolist()))


def _packed(pieces: list[list[int]]) -> np.ndarray:
    return np.array([value for piece in pieces for value in piece], np.int32)
