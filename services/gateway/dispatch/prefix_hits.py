"""The prefixes that requests found cached in the last minutes: which, how long, how often. Noted while somebody looks.

A request counts for the prefix that it found at the worker which computes its prompt, as the index says when it is
placed; so requests that share a system prompt and nothing else count for one prefix.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.gateway.overview import PrefixHit
from services.protocol.block_hash import BlockHash

WINDOWS, WINDOW_S = 5, 60.0
MAX_NAMES = 1024  # of prefixes in a window; further ones are not noted
MAX_SHOWN = 50
_MAX_WORKERS = 16  # of one prefix


@dataclass(slots=True)
class _Hits:
    """The requests that found one prefix."""

    tokens: int
    uses: int = 0
    workers: dict[str, None] = field(default_factory=dict)  # a set in order

    def add(self, uses: int, workers: Sequence[str] | dict[str, None]) -> None:
        """Adds uses at these workers."""
        self.uses += uses
        for worker in workers:
            if len(self.workers) < _MAX_WORKERS:
                self.workers[worker] = None


class PrefixHits:
    """Hits by prefix, in windows of a minute, of which the oldest is dropped. watched: hits are noted."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """clock: seconds since 1970."""
        self.watched = False
        self._clock = clock
        self._windows: deque[tuple[float, dict[BlockHash, _Hits]]] = deque(maxlen=WINDOWS)  # from when on, by name

    def watch(self, on: bool) -> None:
        """Begins or stops to note hits. With the stop, what was noted is dropped."""
        self.watched = on
        if not on:
            self._windows.clear()

    def note(self, name: BlockHash, tokens: int, worker: str) -> None:
        """Notes that a request found a prefix of so many tokens at a worker. name: of the prefix' last block."""
        window = self._window()
        if (hits := window.get(name)) is None:
            if len(window) >= MAX_NAMES:
                return
            window[name] = hits = _Hits(tokens)
        hits.add(1, (worker,))

    def report(self) -> tuple[float, list[PrefixHit]]:
        """Returns from when on hits are counted, and the prefixes that saved the most."""
        self._window()
        sums: dict[BlockHash, _Hits] = {}
        for _, window in self._windows:
            for name, hits in window.items():
                if (of_all := sums.get(name)) is None:
                    sums[name] = of_all = _Hits(hits.tokens)
                of_all.add(hits.uses, hits.workers)
        largest = sorted(sums.items(), key=lambda pair: -pair[1].tokens * pair[1].uses)[:MAX_SHOWN]
        shown = [
            PrefixHit(name.hex(), hits.tokens, hits.uses, hits.tokens * hits.uses, list(hits.workers))
            for name, hits in largest
        ]
        return self._windows[0][0], shown

    def _window(self) -> dict[BlockHash, _Hits]:
        """Returns the newest window; drops those that are too old."""
        now = self._clock()
        while self._windows and self._windows[0][0] <= now - WINDOWS * WINDOW_S:
            self._windows.popleft()
        if not self._windows or self._windows[-1][0] <= now - WINDOW_S:
            self._windows.append((now, {}))
        return self._windows[-1][1]
