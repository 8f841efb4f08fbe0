"""Listeners, who hear what happens to children: in `baton up`, its display."""

from collections.abc import Callable
from typing import Protocol


class Listener(Protocol):
    """Hears what happens to children."""

    def starting(self, name: str, what: str) -> None:
        """A child is about to be started for the first time."""

    def loading(self, name: str, line: str) -> None:
        """A line from a child that is not ready yet."""

    def ready(self, name: str, seconds: float) -> None:
        """A child serves, so long after it was started."""

    def line(self, name: str, line: str) -> None:
        """A line from a child that has been ready."""

    def died(self, name: str, how: str, restart_in_s: float) -> None:
        """A child ended on its own; it will be started again."""

    def say(self, text: str) -> None:
        """Something that a person should know of the whole."""


class SafeListener:
    """A listener whose failures reach nobody, as of a terminal that is gone or a disk that is full.

    What it could not show is counted, and said as soon as it can show something again.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._num_lost = 0
        self._reason = ""

    def starting(self, name: str, what: str) -> None:
        """See Listener."""
        self._tell(lambda: self._listener.starting(name, what))

    def loading(self, name: str, line: str) -> None:
        """See Listener."""
        self._tell(lambda: self._listener.loading(name, line))

    def ready(self, name: str, seconds: float) -> None:
        """See Listener."""
        self._tell(lambda: self._listener.ready(name, seconds))

    def line(self, name: str, line: str) -> None:
        """See Listener."""
        self._tell(lambda: self._listener.line(name, line))

    def died(self, name: str, how: str, restart_in_s: float) -> None:
        """See Listener."""
        self._tell(lambda: self._listener.died(name, how, restart_in_s))

    def say(self, text: str) -> None:
        """See Listener."""
        self._tell(lambda: self._listener.say(text))

    def _tell(self, tell: Callable[[], None]) -> None:
        try:
            if self._num_lost:
                self._listener.say(f"lines that could not be shown: {self._num_lost}, since {self._reason}")
                self._num_lost = 0
            tell()
        except Exception as error:  # what cannot be shown is no reason to end what serves
            self._num_lost += 1
            self._reason = repr(error)
