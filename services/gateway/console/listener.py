"""One listener of the feed: an answer that is a stream, and how far its client has read.

Events are written to it as long as it keeps up. One that does not is behind: it is written nothing until its own task
has waited for it, and has sent what it missed.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from services.gateway.console.view import View


class Stream(Protocol):
    """An answer that has begun: see StreamWriter of `http/http_protocol.py`."""

    @property
    def write(self) -> Callable[[bytes], None]:
        """Writes a part, without waiting; to be called when it is ready."""

    def ready(self) -> bool:
        """True while the client keeps up."""


class Position(NamedTuple):
    """The extent of the feed at the end of a turn. ended, samples, events: places of the next ones."""

    turn: int = 0
    ended: int = 0
    samples: int = 0
    events: int = 0


class Listener:
    """A listener. view: what it sees. position: up to where it was sent everything, while it is behind.

    why_over: why its stream is to end; None: it goes on.
    """

    def __init__(self, stream: Stream, view: View, is_valid: Callable[[], bool], leaves_early: bool) -> None:
        """is_valid: its key still sees this view. leaves_early: it must not hold up the end of its port's server."""
        self.view = view
        self.leaves_early = leaves_early
        self.position = Position()
        self.why_over: str | None = None
        self.is_valid = is_valid
        self._stream = stream
        self._behind = asyncio.Event()
        self._behind.set()  # it has nothing

    def offer(self, events: bytes, position: Position) -> None:
        """Writes the events of a turn, if it keeps up. position: before this turn."""
        if self._behind.is_set():
            return
        if self._stream.ready():
            self._stream.write(events)
        else:
            self.fall_behind(position)

    def fall_behind(self, position: Position) -> None:
        """Lets its task send it what it lacks. position: up to where it was sent everything, if it kept up so far."""
        if not self._behind.is_set():
            self.position = position
            self._behind.set()

    def catch_up(self, position: Position) -> None:
        """Notes that it was sent everything up to this position, and keeps up from now on."""
        self.position = position
        self._behind.clear()

    async def until_behind(self) -> None:
        """Waits until it does not keep up, or is to end."""
        await self._behind.wait()

    def end(self, why: str) -> None:
        """Tells its task to end the stream. why: for a person."""
        self.why_over = self.why_over or why
        self._behind.set()
