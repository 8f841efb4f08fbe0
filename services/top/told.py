"""Events of a feed, as typed values. Fields that this version does not know are passed over.

A worker that is gone or was refused has no figures, and a tenant is told of no workers, so most fields may be missing.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _Told(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Tier(_Told):
    """Blocks of a worker in one kind of memory."""

    used: int = 0
    total: int = 0
    quarantined: int = 0


class Worker(_Told):
    """A worker. since: unix seconds of its state; restarted: further lives that were seen."""

    address: str
    role: str = ""
    state: str = "ok"
    why: str | None = None
    since: float | None = None
    restarted: int = 0
    running: int | None = None
    waiting: int | None = None
    tokens_per_s: float | None = None
    kv: Mapping[str, Tier] | None = None  # by tier
    kernels: str | None = None
    protocol: str | None = None

    @property
    def kv_used(self) -> float | None:
        """The share of the device's blocks that is in use."""
        device = (self.kv or {}).get("device")
        return device.used / device.total if device and device.total else None

    @property
    def quarantined(self) -> int:
        """Blocks of all tiers that are in quarantine."""
        return sum(tier.quarantined for tier in (self.kv or {}).values())


class Link(_Told):
    """A pair of workers, and its handoffs so far. reading_s: the time in which reads were open, added up."""

    prefill: str
    decode: str
    transport: str | None = None
    why: str | None = None
    handoffs: int = 0
    failed: int = 0
    num_bytes: int = Field(default=0, alias="bytes")
    reading_s: float = 0.0
    avoided: bool = False


class Request(_Told):
    """A request in short. n: its number at this gateway, since ids may repeat; at: unix seconds of its arrival."""

    n: int
    id: str
    at: float
    endpoint: str | None = None
    model: str | None = None
    key: str | None = None
    state: str = ""
    phase: str | None = None
    status: int | str | None = None
    error: str | None = None
    prompt: int | None = None
    cached: int | None = None
    generated: int | None = None
    finish: str | None = None
    ttft_ms: float | None = None
    ms: float | None = None
    attempts: int = 0
    workers: Mapping[str, str] | None = None  # addresses by role


class Unhealthy(_Told):
    """Something that is wrong now. since: unix seconds."""

    what: str
    name: str
    why: str | None = None
    since: float | None = None


class FleetEvent(_Told):
    """Something that happened to the fleet. at: unix seconds."""

    at: float
    kind: str
    name: str = ""
    text: str = ""


class Gateway(_Told):
    """The gateway that tells."""

    id: str
    pid: int | None = None
    version: str = ""
    in_flight: int = 0
    waiting: int = 0
    uptime_s: float = 0.0
    draining: bool = False


class Redis(_Told):
    """Redis, as the gateway sees it. state: ok, down or none."""

    state: str = "none"
    why: str | None = None


class Hello(_Told):
    """The first event of a feed. sees: `all`, or a tenant's `own` requests."""

    version: str = ""
    pid: int | None = None
    sees: str = "all"
    requests: tuple[Request, ...] = ()
    events: tuple[FleetEvent, ...] = ()


class Tick(_Told):
    """The state of the fleet, once a second. gateway: None for a tenant, who is told of no fleet."""

    now: float
    gateway: Gateway | None = None
    redis: Redis = Redis()
    workers: tuple[Worker, ...] = ()
    links: tuple[Link, ...] = ()
    unhealthy: tuple[Unhealthy, ...] = ()


class Sample(_Told):
    """Sums over some seconds."""

    s: float
    requests: Mapping[str, int] = Field(default_factory=dict)  # by how they ended
    generated_tokens: int = 0

    def per_second(self, count: int) -> float:
        """Divides by the sample's time."""
        return count / self.s if self.s else 0.0


class Rows(_Told):
    """Requests that are new or have changed."""

    rows: tuple[Request, ...] = ()


class End(_Told):
    """The last event of a feed that the gateway ends."""

    why: str


Told = Hello | Tick | Sample | Rows | FleetEvent

_KINDS: Mapping[str, type[Told]] = {
    "hello": Hello,
    "tick": Tick,
    "sample": Sample,
    "requests": Rows,
    "event": FleetEvent,
}


def read_told(name: str, data: Any) -> Told | None:
    """Reads an event of a feed; None for one that this version does not know. Raises ValueError."""
    kind = _KINDS.get(name)
    return None if kind is None else kind.model_validate(data)
