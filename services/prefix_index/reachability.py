"""The state of Redis, as whoever asks it regularly finds it."""

import time
from collections.abc import Callable


class Reachability:
    """The last word on whether a server answers. since: of that state, in seconds since 1970; None: nobody asked yet.

    why: it does not answer; None: it does, or nobody asked yet.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.why: str | None = None
        self.since: float | None = None

    def note_answer(self) -> None:
        """Notes that it answered."""
        if self.since is None or self.why is not None:
            self.since, self.why = self._clock(), None

    def note_failure(self, why: str) -> None:
        """Notes that it did not answer, and why."""
        if self.why is None:
            self.since = self._clock()
        self.why = why
