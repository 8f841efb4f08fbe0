"""Looks how late timers of an event loop fire: so long something held the loop, and everybody waited."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import NoReturn

_EVERY_S = 0.1


async def watch_loop(observe: Callable[[float], None]) -> NoReturn:
    """Calls `observe` ten times a second with the seconds that a timer was late, until cancelled."""
    while True:
        due = monotonic() + _EVERY_S
        await asyncio.sleep(_EVERY_S)
        observe(max(0.0, monotonic() - due))
