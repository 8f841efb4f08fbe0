"""A bound on retries of the whole gateway: where everything fails, retries must not multiply the load.

A token bucket: each first attempt adds a part of a retry, time adds some, and each retry after a failure takes one.
Retries after progress, refusals and planned restarts take none. A retry that finds the bucket empty waits; it is not
refused, since a request must not be lost to the failures of others.
"""

from collections.abc import Callable

PER_REQUEST = 0.2  # retries for each first attempt
PER_S = 10.0
MOST = 1000.0  # as many as may be in flight at a worker that ends


class RetryBudget:
    """The retries that are allowed now."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = MOST
        self._at = clock()

    def note_request(self) -> None:
        """Counts a first attempt."""
        self._left = min(MOST, self._left + PER_REQUEST)

    def take(self) -> float:
        """Takes a retry. Returns 0, or the seconds after which there may be one."""
        now = self._clock()
        self._left = min(MOST, self._left + (now - self._at) * PER_S)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / PER_S
        self._left -= 1
        return 0.0
