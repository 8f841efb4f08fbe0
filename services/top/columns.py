"""The columns of workers, links, requests and events, most wanted first, for `baton ls` and `baton top`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.top import figures
from services.top.told import FleetEvent, Link, Request, Worker

T = TypeVar("T")

Sortable = str | float


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column. order: what rows are sorted by; None: its text. now: unix seconds."""

    title: str
    text: Callable[[T, float], str]
    order: Callable[[T], Sortable | None] | None = None
    right: bool = False  # numbers end below each other

    def key(self, row: T, now: float) -> tuple[bool, Sortable]:
        """Returns what rows are sorted by; unknown values come last."""
        value = self.text(row, now) if self.order is None else self.order(row)
        return value is None, 0.0 if value is None else value


def _number(title: str, order: Callable[[T], float | None], text: Callable[[T], str]) -> Column[T]:
    return Column(title, lambda row, _: text(row), order, right=True)


def _words(title: str, text: Callable[[T], str | None]) -> Column[T]:
    return Column(title, lambda row, _: text(row) or figures.UNKNOWN)


def _since(at: float | None, now: float) -> str:
    return figures.age(None if at is None else now - at)


WORKERS: Sequence[Column[Worker]] = (
    _words("worker", lambda worker: worker.address),
    _words("role", lambda worker: worker.role),
    _words("state", lambda worker: worker.state),
    Column("since", lambda worker, now: _since(worker.since, now), lambda worker: worker.since, right=True),
    _number("run", lambda worker: worker.running, lambda worker: figures.count(worker.running)),
    _number("wait", lambda worker: worker.waiting, lambda worker: figures.count(worker.waiting)),
    _number("KV", lambda worker: worker.kv_used, lambda worker: figures.share(worker.kv_used)),
    _number("tok/s", lambda worker: worker.tokens_per_s, lambda worker: figures.rate(worker.tokens_per_s)),
    _number("quar", lambda worker: worker.quarantined, lambda worker: figures.count(worker.quarantined)),
    _number("lives", lambda worker: worker.restarted, lambda worker: figures.count(worker.restarted)),
    _words("kernels", lambda worker: worker.kernels),
    _words("protocol", lambda worker: worker.protocol),
    _words("why", lambda worker: worker.why),
)

LINKS: Sequence[Column[Link]] = (
    _words("prefill", lambda link: link.prefill),
    _words("decode", lambda link: link.decode),
    _words("by", lambda link: link.transport),
    _number("handoffs", lambda link: link.handoffs, lambda link: figures.count(link.handoffs)),
    _number("failed", lambda link: link.failed, lambda link: figures.count(link.failed)),
    _number("moved", lambda link: link.num_bytes, lambda link: figures.size(link.num_bytes)),
    _number("rate", lambda link: _rate(link), lambda link: _rate_in_words(link)),
    _words("avoided", lambda link: "avoided" if link.avoided else None),
    _words("why", lambda link: link.why),
)

REQUESTS: Sequence[Column[Request]] = (
    Column("at", lambda request, _: figures.clock(request.at), lambda request: request.at),
    _words("request", lambda request: request.id),
    _words("state", lambda request: state_of(request)),
    _number("prompt", lambda request: request.prompt, lambda request: figures.count(request.prompt)),
    _number("cached", lambda request: request.cached, lambda request: figures.count(request.cached)),
    _number("made", lambda request: request.generated, lambda request: figures.count(request.generated)),
    _number("TTFT ms", lambda request: request.ttft_ms, lambda request: figures.milliseconds(request.ttft_ms)),
    _number("ms", lambda request: request.ms, lambda request: figures.milliseconds(request.ms)),
    _number("tries", lambda request: request.attempts, lambda request: figures.count(request.attempts)),
    _words("prefill", lambda request: _worker(request, "prefill")),
    _words("decode", lambda request: _worker(request, "decode")),
    _words("model", lambda request: request.model),
    _words("key", lambda request: request.key),
    _words("endpoint", lambda request: request.endpoint),
    _words("error", lambda request: request.error),
)

EVENTS: Sequence[Column[FleetEvent]] = (
    Column("at", lambda event, _: figures.clock(event.at), lambda event: event.at),
    _words("event", lambda event: event.kind.replace("_", " ")),
    _words("of", lambda event: event.name),
    _words("says", lambda event: event.text),
)


def state_of(request: Request) -> str:
    """Says where a request is, or how it ended."""
    if request.state == "in flight":
        return request.phase or request.state
    return " ".join(str(part) for part in (request.status or request.state, request.finish) if part)


def _worker(request: Request, role: str) -> str | None:
    return None if request.workers is None else request.workers.get(role)


def _rate(link: Link) -> float | None:
    return link.num_bytes / link.reading_s if link.reading_s else None


def _rate_in_words(link: Link) -> str:
    rate = _rate(link)
    return figures.UNKNOWN if rate is None else f"{figures.size(rate)}/s"
