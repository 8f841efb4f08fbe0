"""The dispatch side at one moment, as values, for people who look on.

Consoles read them; both sides know this module alone. Times are in seconds since 1970.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class WorkerState(StrEnum):
    """A worker as this gateway sees it."""

    OK = "ok"
    DRAINING = "draining"
    GONE = "gone"  # it was connected
    REFUSED = "refused"  # it does not fit
    CONNECTING = "connecting"  # it was not connected so far


@dataclass(frozen=True, slots=True)
class BlockUse:
    """The blocks of a worker's pool. used: by sequences; a cached block that nobody refers to is not."""

    used: int
    total: int
    quarantined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOverview:
    """One worker.

    why: it is not connected, in plain words; None: it is. detail: the same as the system or the network said it; None:
    that says no more. since: of its state. restarted: lives after the first one that was seen.
    described: as `/debug/ledger` has it; of one that is gone as it was last, of one that never came nothing.
    computed_tokens, evicted_blocks: in this life; None where it is not connected.
    """

    address: str
    state: WorkerState
    why: str | None
    since: float
    restarted: int
    described: Mapping[str, object]
    detail: str | None = None
    blocks: BlockUse | None = None
    computed_tokens: int | None = None
    evicted_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class AvoidedPair:
    """Two workers, by their addresses, that are not paired for a while. since: None: not known."""

    prefill: str
    decode: str
    why: str
    since: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOverview:
    """The dispatch side. waiting: choices without a worker. ready: a request would find a worker."""

    gateway: str
    ready: bool
    draining: bool
    waiting: int
    workers: Sequence[WorkerOverview]
    avoided: Sequence[AvoidedPair]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A prefix that requests found cached lately. name: of its last block, in hex. workers: those that had it."""

    name: str
    tokens: int
    uses: int
    saved_tokens: int
    workers: Sequence[str]


class Overseen(Protocol):
    """The dispatch side, as it is shown."""

    def gateway_id(self) -> str:
        """Returns the gateway's id, which changes when all of its handles are used up."""

    def overview(self) -> DispatchOverview:
        """Says how everything is now."""

    def watch_prefixes(self, on: bool) -> None:
        """Begins or stops to note which prefixes requests find cached; what was noted is dropped with the stop."""

    def prefix_hits(self) -> tuple[float, Sequence[PrefixHit]]:
        """Returns since when prefixes are noted that are still counted, and the largest, by what they saved."""
