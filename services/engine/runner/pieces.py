"""The pieces of a step that computes prompts, on which stages of a model work at the same time.

    a step    row 0: tokens 0 to 299 | row 1: tokens 0 to 211          queries are numbered through the step
    pieces    row 0: 0 to 255  |  row 0: 256 to 299, row 1: 0 to 211

A piece is a step of its own: its rows are longer ones' next tokens. Pieces come in the order of the step's tokens, so
that the KV of a prompt's tokens is there before later ones attend to it. No row reads what another row of its step
writes (a block is a hit when the step that fills it has ended), so rows may be cut apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from services.engine.runner.base import StepTokens

_UNIT = 32  # tokens: kernels multiply some rows at a time
# Tokens of a piece. With fewer, weights are read more often, and kernels have fewer rows at a time; with more, stages
# wait longer for the first piece, and for the last one. `python -m loadtest micro stages` measures it.
LEAST, MOST = 64, 512
_PIECES = 16  # of a step, about


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A piece of a step."""

    place: slice  # of its tokens among the step's
    queries: np.ndarray  # int64[Q]: places of its queries among the step's
    tokens: StepTokens


def pieces_of(tokens: StepTokens) -> Iterator[Piece]:
    """Yields the pieces of a step, one if it computes no prompts to speak of. They are a function of the tokens alone,
    so that all stages cut alike.
    """
    count = len(tokens.token_ids)
    size = count
    if tokens.computes_prompts:
        size = min(max(-(-count // (_PIECES * _UNIT)) * _UNIT, LEAST), MOST)
    for start in range(0, count, size):
        yield _piece(tokens, start, min(start + size, count))


def _piece(tokens: StepTokens, start: int, stop: int) -> Piece:
    starts = tokens.query_starts
    first = int(np.searchsorted(starts, start, side="right")) - 1
    last = int(np.searchsorted(starts, stop, side="left"))
    rows, place = slice(first, last), slice(start, stop)
    ends = starts[first + 1 : last + 1]
    queries = np.flatnonzero((tokens.queries >= start) & (tokens.queries < stop))
    return Piece(
        place,
        queries,
        StepTokens(
            token_ids=tokens.token_ids[place],
            positions=tokens.positions[place],
            query_starts=np.clip(starts[first : last + 1], start, stop) - np.int32(start),
            seq_lens=tokens.seq_lens[rows] - (ends - np.minimum(ends, stop)),
            block_tables=tokens.block_tables[rows],
            queries=tokens.queries[queries] - start,
            token_types=tokens.token_types[place],
        ),
    )
