"""A watch on the engine thread: one that has work and makes no round for far longer than its rounds take hangs.

A hung engine says nothing of itself, and the worker's event loop goes on: it answers pings, and sends pulses to
consumers. So the worker has to end; its streams break, its requests go on elsewhere, and it is started again.

Time is counted in ticks of the event loop, each for at most a second. A machine that stands still, or a process that
was stopped, does not age the round that it is in.
"""

import asyncio
from collections.abc import Callable
from typing import NoReturn, Protocol

TICK_S = 0.25
_MOST_OF_A_TICK_S = 1.0
LEAST_S = 30.0  # a round may take this long in any case
_TIMES_LONGEST = 10.0  # the longest round so far
_FIRST_ROUNDS = 3  # kernels may be compiled in them
FIRST_S = 600.0


class Rounds(Protocol):
    """The progress of an engine thread, as others may read it."""

    num_rounds: int  # that have ended
    longest_round_s: float
    resting: bool  # it waits for a call


class EngineWatch:
    """Counts how long the round under way has taken. `on_hang` is told once, in words."""

    def __init__(self, rounds: Rounds, on_hang: Callable[[str], None]) -> None:
        self._rounds = rounds
        self._on_hang = on_hang
        self._seen = 0
        self._stood_s = 0.0
        self.hangs = False

    async def run(self) -> NoReturn:
        """Looks at the thread again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            self.tick(now - before)
            before = now

    def tick(self, elapsed_s: float) -> None:
        """Looks at the thread, so long after the last look."""
        rounds = self._rounds
        if rounds.resting or rounds.num_rounds != self._seen:
            self._seen, self._stood_s = rounds.num_rounds, 0.0
            return
        self._stood_s += min(elapsed_s, _MOST_OF_A_TICK_S)
        if not self.hangs and self._stood_s > self._bound_s():
            self.hangs = True
            self._on_hang(f"the engine has made no step for {self._stood_s:.0f} s")

    def _bound_s(self) -> float:
        if self._rounds.num_rounds < _FIRST_ROUNDS:
            return FIRST_S
        return max(LEAST_S, _TIMES_LONGEST * self._rounds.longest_round_s)
