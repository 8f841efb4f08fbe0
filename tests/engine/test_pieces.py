"""Pieces of steps, as stages work on them."""

import numpy as np
import pytest

from services.engine.runner.base import SamplingBatch, StepInput, StepTokens
from services.engine.runner.pieces import LEAST, MOST, pieces_of


def a_step(lengths: list[int], before: list[int]) -> StepTokens:
    """Rows of so many tokens after so many others, with queries in no order."""
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    positions = [np.arange(first, first + length) for first, length in zip(before, lengths, strict=True)]
    tokens = StepTokens(
        token_ids=np.arange(starts[-1], dtype=np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        query_starts=starts,
        seq_lens=np.add(lengths, before, dtype=np.int32),
        block_tables=np.arange(len(lengths) * 3, dtype=np.int32).reshape(-1, 3),
    )
    sampled = starts[1:].astype(np.int64) - 1
    rest = np.random.default_rng(0).permutation(np.setdiff1d(np.arange(starts[-1]), sampled))[: starts[-1] // 3]
    StepInput.of(tokens, sampled, SamplingBatch.greedy(len(lengths)))
    tokens.queries = np.concatenate([rest[::2], sampled, rest[1::2]])
    return tokens


def seen(tokens: StepTokens) -> list[tuple[int, int, int, list[int]]]:
    """What each token is: its id, its position, how many tokens its row sees at its end, and its block table."""
    rows = np.repeat(np.arange(len(tokens.seq_lens)), np.diff(tokens.query_starts))
    ends = tokens.query_starts[1:][rows] - 1
    sees = tokens.seq_lens[rows] - (ends - np.arange(len(rows)))
    return [
        (int(token), int(position), int(number), tokens.block_tables[row].tolist())
        for token, position, number, row in zip(tokens.token_ids, tokens.positions, sees, rows, strict=True)
    ]


@pytest.mark.parametrize(
    ("lengths", "before"),
    [
        ([LEAST - 1, 1], [0, 7]),
        ([LEAST, 1, LEAST], [5, 100, 0]),
        ([2 * LEAST + 1], [3]),
        ([1, 1, 3 * LEAST, 1, 1, 77, LEAST, 1], [9, 1, 0, 4, 4, 50, 16, 2]),
        ([9 * MOST + 13, 40], [0, 0]),
    ],
)
def test_pieces_have_a_steps_tokens_in_order_with_what_each_sees(lengths: list[int], before: list[int]) -> None:
    step = a_step(lengths, before)
    pieces = list(pieces_of(step))
    assert len(pieces) == max(1, -(-sum(lengths) // pieces[0].place.stop))
    assert all(LEAST <= len(piece.tokens.token_ids) <= MOST for piece in pieces[:-1])
    assert [found for piece in pieces for found in seen(piece.tokens)] == seen(step)
    assert np.array_equal(
        np.concatenate([np.arange(len(step.token_ids))[piece.place] for piece in pieces]), step.token_ids
    )
    found = np.full(len(step.queries), -1)
    for piece in pieces:
        assert not piece.tokens.query_starts[0]
        assert (np.diff(piece.tokens.query_starts) > 0).all(), "no row is empty"
        found[piece.queries] = piece.tokens.token_ids[piece.tokens.queries]
    assert np.array_equal(found, step.token_ids[step.queries])


def test_a_step_that_decodes_is_one_piece() -> None:
    step = a_step([1] * 700, [10] * 700)
    (piece,) = pieces_of(step)
    assert seen(piece.tokens) == seen(step)
    assert np.array_equal(piece.tokens.queries[np.argsort(piece.queries)], step.queries)
