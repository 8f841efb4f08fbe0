"""Leaks: the rest of requests when all of them are over, and every fault is undone."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Protocol

from loadtest.ledger import Leftovers, leftovers

BASELINE_S = 90.0  # leases, graces and quarantines are over by then
_LOOK_S = 0.5


class Ledgers(Protocol):
    """Whoever knows the gateways."""

    async def ledgers(self) -> Mapping[str, Any]:
        """Returns the ledger of each gateway that answers, by name."""


async def leaked(gateways: Ledgers, timeout_s: float = BASELINE_S) -> Leftovers:
    """Waits until nothing is left, and returns what still is when the time is over.

    Blocks and sequences are the workers', so that each gateway tells of the same: the most that any of them knows of.
    """
    until = time.monotonic() + timeout_s
    while True:
        found = [leftovers(ledger) for ledger in (await gateways.ledgers()).values()]
        left = Leftovers(
            blocks=max((each.blocks for each in found), default=0),
            entries=sum(each.entries for each in found),
            sequences=max((each.sequences for each in found), default=0),
        )
        if (found and not left) or time.monotonic() > until:
            return left
        await asyncio.sleep(_LOOK_S)
