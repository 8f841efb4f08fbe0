"""The client's own share in what it measures: its CPU, how late it sends, and how late it reads."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

_INTERVAL_S = 0.02
_MAX_LOOKS = 1_000_000  # five hours


@dataclass(slots=True)
class OwnDelay:
    """Measured while a run is under way. late_s: of looks at the clock, each so much later than it was due.

    What comes over the network waits for the event loop as these looks do: so late it may be read.
    """

    late_s: "array[float]"
    cpu_s: float = 0.0
    seconds: float = 0.0


@asynccontextmanager
async def watched() -> AsyncIterator[OwnDelay]:
    """Watches the event loop while the block runs; the result is complete behind it."""
    delay = OwnDelay(array("d"))
    watching = asyncio.create_task(_look(delay))
    cpu_s, began_s = time.process_time(), time.perf_counter()
    try:
        yield delay
    finally:
        delay.cpu_s, delay.seconds = time.process_time() - cpu_s, time.perf_counter() - began_s
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _look(delay: OwnDelay) -> None:
    while len(delay.late_s) < _MAX_LOOKS:
        due_s = time.perf_counter() + _INTERVAL_S
        await asyncio.sleep(_INTERVAL_S)
        delay.late_s.append(max(0.0, time.perf_counter() - due_s))
