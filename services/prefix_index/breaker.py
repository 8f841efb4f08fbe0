"""Spares callers the wait for a server that does not answer."""

from collections.abc import Callable

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0


class CircuitBreaker:
    """After a failure nobody is let through for a while, then one at a time until one succeeds.

    The pause doubles with each failure in a row. Not for threads.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_s = 0.0  # 0: closed, calls go through
        self._opens_at = 0.0

    @property
    def broken(self) -> bool:
        """True since a failure, until a success."""
        return self._pause_s > 0

    def let_through(self) -> bool:
        """True when the caller may try; it must then say how it went."""
        if not self.broken:
            return True
        if self._clock() < self._opens_at:
            return False
        self._opens_at = self._clock() + self._pause_s  # others wait for this one's word
        return True

    def succeeded(self) -> None:
        """A call was answered."""
        self._pause_s = 0.0

    def failed(self) -> None:
        """A call was not."""
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S) or _FIRST_PAUSE_S
        self._opens_at = self._clock() + self._pause_s
