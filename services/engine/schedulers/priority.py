"""The ranks of requests: by priority, where lower is sooner, until a request has waited so long that it is due.

Requests of equal rank are ordered by the scheduler's own rule. Without priorities all ranks are equal until a request
is due, and those that are due come first.
"""

import numpy as np

from services.engine.sequences.batch_state import BatchState
from services.engine.sequences.request import Request

DUE_S = 30.0  # after which a request comes before all that are not due, so that nothing starves
_DUE = -(2**31)  # below every priority that the gateway takes


def rank(request: Request, now: float) -> int:
    """Returns the rank of a request that waits; lower ones come first."""
    return _DUE if now - request.arrival >= DUE_S else request.capsule.priority


def rank_slots(batch: BatchState, slots: np.ndarray, now: float) -> np.ndarray:
    """Returns the ranks of the sequences in int64[n] slots, int32[n]."""
    due = now - batch.arrival[slots] >= DUE_S
    ranks: np.ndarray = np.where(due, np.int32(_DUE), batch.priority[slots])
    return ranks
