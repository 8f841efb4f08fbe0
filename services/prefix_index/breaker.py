"""Spares callers the wait for a server that does not answer."""

from collections.abc import Callable

from services.process.backoff import Backoff

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0


class CircuitBreaker:
    """Lets nobody through for a while after a failure, then one call at a time until one succeeds.

    The pause doubles with each failure in a row; calls that were under way together fail as one. Not for threads.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._pause_s = 0.0  # the last one
        self._opens_at = 0.0
        self._failed_at = 0.0

    @property
    def broken(self) -> bool:
        """True from a failure until the next success."""
        return self._backoff.failing

    def let_through(self) -> float | None:
        """Returns the time at which the caller's call begins, which `failed` takes; None: the caller must not call."""
        now = self._clock()
        if self.broken:
            if now < self._opens_at:
                return None
            self._opens_at = now + self._pause_s  # others wait for this one's word
        return now

    def succeeded(self) -> None:
        """Notes that a call was answered."""
        self._backoff.reset()

    def failed(self, began: float) -> None:
        """Notes that the call which began at this time failed."""
        if self.broken and began < self._failed_at:
            return
        self._failed_at = self._clock()
        self._pause_s = self._backoff.next_s()
        self._opens_at = self._failed_at + self._pause_s
