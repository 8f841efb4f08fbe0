"""Waits between tries, which double with each failure in a row."""


class Backoff:
    """The waits after failures: `first_s`, then twice the last one, up to `longest_s`; in seconds."""

    __slots__ = ("_first_s", "_last_s", "_longest_s")

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._last_s = 0.0

    @property
    def failing(self) -> bool:
        """True from a failure until the next `reset`."""
        return self._last_s > 0

    def next_s(self) -> float:
        """Notes a failure, and returns how long to wait after it."""
        self._last_s = min(2 * self._last_s, self._longest_s) or self._first_s
        return self._last_s

    def reset(self) -> None:
        """Notes a success: the next failure is the first in a row."""
        self._last_s = 0.0
