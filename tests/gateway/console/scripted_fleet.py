"""The dispatch side as a console sees it, without workers: says what a test tells it to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.overview import (
    AvoidedPair,
    BlockUse,
    DispatchOverview,
    PrefixHit,
    WorkerOverview,
    WorkerState,
)


def a_worker(address: str = "127.0.0.1:1", state: WorkerState = WorkerState.OK, **changes: Any) -> WorkerOverview:
    """A worker that is connected, unless `changes` say otherwise."""
    fields: dict[str, Any] = {
        "why": None,
        "since": 1000.0,
        "restarted": 0,
        "described": {"address": address, "incarnation": f"life of {address}", "role": "decode"},
        "blocks": BlockUse(16, 64, 0),
        "computed_tokens": 100,
        "evicted_blocks": 0,
    }
    return WorkerOverview(address=address, state=state, **{**fields, **changes})


@dataclass
class ScriptedFleet:
    """See Overseen. watched: somebody looks at prefixes.

    broken: raised instead of the prefixes, once.
    """

    workers: list[WorkerOverview] = field(default_factory=lambda: [a_worker()])
    avoided: list[AvoidedPair] = field(default_factory=list)
    draining: bool = False
    waiting: int = 0
    watched: bool = False
    hits: list[PrefixHit] = field(default_factory=list)
    asked: int = 0  # for an overview
    broken: Exception | None = None

    def gateway_id(self) -> str:
        return "00000000000000aa"

    def overview(self) -> DispatchOverview:
        self.asked += 1
        return DispatchOverview(
            gateway=self.gateway_id(),
            ready=not self.draining,
            draining=self.draining,
            waiting=self.waiting,
            workers=tuple(self.workers),
            avoided=tuple(self.avoided),
        )

    def watch_prefixes(self, on: bool) -> None:
        self.watched = on

    def prefix_hits(self) -> tuple[float, Sequence[PrefixHit]]:
        broken, self.broken = self.broken, None
        if broken is not None:
            raise broken
        return 1000.0, self.hits
