"""Finds the rows of a step for which a runner computed numbers that are not finite: NaN or infinite.

Looked at are the logits of rows that get a token (by samplers, which put NOT_FINITE in its place), those of scored
tokens, and sums of hidden states that are pooled. A row that gets no token has its last hidden state looked at: a
token's KV reaches all later tokens, as far as an attention window allows. So no block of a prompt is published before a
number that depends on it has been seen; but for tokens of a chunk that is longer than the window, whose number is seen
only if it has reached the chunk's last token through the layers.
"""

import numpy as np

from services.engine.runner.base import NO_ROWS, StepInput, StepOutput


def watched_rows(step: StepInput) -> np.ndarray:
    """Returns the rows whose last token's hidden state is looked at, int64[W]: all that get no token."""
    gets_none = np.ones(len(step.seq_lens), dtype=np.bool_)
    gets_none[step.sample_rows] = False
    return np.flatnonzero(gets_none)


def last_queries(step: StepInput, rows: np.ndarray) -> np.ndarray:
    """Returns the last query token of each of these rows, int64[n]."""
    last: np.ndarray = step.query_starts[rows + 1].astype(np.int64) - 1
    return last


def rows_not_finite(step: StepInput, output: StepOutput, watched: np.ndarray | None = None) -> np.ndarray:
    """Returns the rows in which something is not finite, int64[M]; usually none.

    watched: bool[W], whether the hidden states of `watched_rows` are finite. None: there are no such rows.
    """
    rows = []
    if len(output.token_ids) and output.token_ids.min() < 0:
        rows.append(step.sample_rows[output.token_ids < 0])
    if watched is not None and not watched.all():
        rows.append(watched_rows(step)[~watched])
    if step.scored is not None and output.scored is not None:
        rows.append(_rows_of(step, step.scored.queries[~np.isfinite(output.scored.sampled)]))
    if step.pooled is not None and output.pooled is not None:
        ended = ~np.isfinite(output.pooled).all(axis=1)
        rows.append(_rows_of(step, step.pooled.queries[step.pooled.starts[:-1][ended]]))
    found = np.concatenate(rows) if rows else NO_ROWS
    return np.unique(found) if len(found) else NO_ROWS


def _rows_of(step: StepInput, queries: np.ndarray) -> np.ndarray:
    """Returns the rows that these query tokens belong to."""
    rows: np.ndarray = np.searchsorted(step.query_starts, queries, side="right") - 1
    return rows
