"""Finds the rows of a step for which a runner computed numbers that are not finite: NaN or infinite.

Looked at are the logits of rows that get a token (by samplers, which put NOT_FINITE in its place), those of scored
tokens, and sums of hidden states that are pooled. A row that gets no token has its last hidden state looked at: a
token's KV reaches all later tokens, as far as an attention window allows. So no block of a prompt is published before a
number that depends on it has been seen; but for tokens of a chunk that is longer than the window, whose number is seen
only if it has reached the chunk's last token through the layers.
"""

import numpy as np

from services.engine.runner.base import NO_ROWS, StepInput, StepOutput


def rows_not_finite(step: StepInput, output: StepOutput, watched: np.ndarray | None = None) -> np.ndarray:
    """Returns the rows in which something is not finite, int64[M]; usually none.

    watched: bool[W], whether the hidden states of `step.watched` are finite. None: nobody looked.
    """
    queries = []
    if len(output.token_ids) and output.token_ids.min() < 0:
        queries.append(step.sampled[output.token_ids < 0])
    if watched is not None and not watched.all():
        queries.append(step.watched[~watched])
    if step.scored is not None and output.scored is not None:
        queries.append(step.scored.queries[~np.isfinite(output.scored.sampled)])
    if step.pooled is not None and output.pooled is not None:
        ended = ~np.isfinite(output.pooled).all(axis=1)
        queries.append(step.pooled.queries[step.pooled.starts[:-1][ended]])
    found = np.concatenate(queries) if queries else NO_ROWS
    return np.unique(step.tokens.rows_of(found)) if len(found) else NO_ROWS
