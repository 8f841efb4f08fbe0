"""The supply of a run: scripts whose first bodies are made before they are sent."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.bench.endpoints import Endpoint
from loadtest.bench.script import Script, Turn

_AHEAD, _AHEAD_BYTES = 4000, 64 << 20  # bodies that are made before the run


@dataclass(frozen=True, slots=True)
class Ready:
    """A script with the body of its first request. turns: of a conversation all; else none, whose prompt takes room."""

    body: bytes
    turns: tuple[Turn, ...]
    at_s: float | None
    pause_s: float


class Supply:
    """Scripts whose first bodies are made before the run, up to a bound; further ones when they are taken."""

    def __init__(self, scripts: Iterator[Script], endpoint: Endpoint) -> None:
        self._scripts = scripts
        self._endpoint = endpoint
        self._ready: deque[Ready] = deque()
        num_bytes = 0
        while len(self._ready) < _AHEAD and num_bytes < _AHEAD_BYTES and (ready := self._make()) is not None:
            self._ready.append(ready)
            num_bytes += len(ready.body)

    def take(self) -> Ready | None:
        """Takes the next one; None: there is none left."""
        return self._ready.popleft() if self._ready else self._make()

    def _make(self) -> Ready | None:
        if (script := next(self._scripts, None)) is None:
            return None
        turns = script.turns if len(script.turns) > 1 else ()
        return Ready(self._endpoint.body(script.turns[0], ()), turns, script.at_s, script.pause_s)
