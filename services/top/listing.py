"""A fleet at one moment, as tables and as JSON: for `baton ls`."""

from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from services.top import columns, tables
from services.top.feed import GatewayClient
from services.top.told import Hello, Rows, Tick
from services.top.view import View

JSON_VERSION = 1  # raised where a field changes its meaning or goes; further fields may come
KINDS = ("workers", "links", "requests")
_MOST_TICKS = 3  # the first has no rates, and the second may come too soon after it


@dataclass(slots=True)
class Snapshot:
    """The fleet at one moment, as typed values and as the gateway's own JSON."""

    view: View = field(default_factory=View)
    tick: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, Any] = field(default_factory=dict)  # requests, by their numbers


async def take_snapshot(client: GatewayClient, *, with_rates: bool = False) -> Snapshot:
    """Reads a feed up to its first tick. Raises GatewayError.

    with_rates: up to the first tick that has the tokens a second of its workers, or the third one: a gateway compares
    ticks that are not too near each other, and makes them only while somebody listens.
    """
    snapshot, ticks_left = Snapshot(), _MOST_TICKS if with_rates else 1
    async with aclosing(client.feed()) as feed:
        async for told, data in feed:
            snapshot.view.take(told)
            if isinstance(told, Tick):
                snapshot.tick = data
                ticks_left -= 1
                if not ticks_left or all(worker.tokens_per_s is not None for worker in told.workers):
                    break
            elif isinstance(told, Rows | Hello):
                rows = data["rows"] if isinstance(told, Rows) else data.get("requests", ())
                snapshot.rows |= {row["n"]: row for row in rows}
    return snapshot


def as_text(snapshot: Snapshot, kinds: Collection[str], limit: int, width: int | None) -> str:
    """Returns a table of each kind. limit: of requests. width: of the terminal."""
    view, now = snapshot.view, snapshot.view.tick.now if snapshot.view.tick else 0.0
    made = {
        "workers": lambda: tables.as_table(columns.WORKERS, view.workers(), now, width),
        "links": lambda: tables.as_table(columns.LINKS, view.links(), now, width),
        "requests": lambda: tables.as_table(columns.REQUESTS, view.requests()[:limit], now, width),
    }
    return "\n\n".join(made[kind]() for kind in KINDS if kind in kinds)


def as_values(snapshot: Snapshot, kinds: Sequence[str], limit: int) -> dict[str, Any]:
    """Returns the same as JSON values, with all fields that the gateway has."""
    newest = [snapshot.rows[request.n] for request in snapshot.view.requests()[:limit]]
    values = {
        "workers": snapshot.tick.get("workers", []),
        "links": snapshot.tick.get("links", []),
        "requests": newest,
    }
    beside = {name: snapshot.tick.get(name) for name in ("now", "gateway", "gateways", "redis", "unhealthy")}
    return {"version": JSON_VERSION, **beside, **{kind: values[kind] for kind in KINDS if kind in kinds}}
