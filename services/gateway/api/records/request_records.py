"""The records of recent requests, and what becomes of one when its request ends: metrics, a log line, spans."""

from collections import deque
from collections.abc import Callable, Mapping
from itertools import chain
from time import monotonic
from typing import Any

import structlog

from kvtransfer.moved import Moved
from services.gateway.api.records.attempt_record import AttemptRecord
from services.gateway.api.records.kept_text import KeptText
from services.gateway.api.records.request_phases import first_attempt, phases
from services.gateway.api.records.request_record import RequestRecord
from services.gateway.api.records.request_rows import RequestRows
from services.gateway.api.records.tracing import Tracing
from services.gateway.metrics import GatewayMetrics

KEPT = 512  # requests

log = structlog.get_logger()


class RequestRecords:
    """The last requests that generate, those in flight among them. `tracing`: None makes no spans.

    rows: the same requests in short, and many more that have ended.
    """

    def __init__(self, metrics: GatewayMetrics, tracing: Tracing | None = None, *, keeps_text: bool = False) -> None:
        """keeps_text: of prompts and answers, beside their records."""
        self._metrics = metrics
        self._keeps_text = keeps_text
        self._tracing = tracing
        self._recent: deque[RequestRecord] = deque(maxlen=KEPT)
        self.rows = RequestRows()

    def begin(self, record: RequestRecord, header: Callable[[str], str]) -> None:
        """Keeps the record of a request that generates. `header` returns the client's headers by name, "" for none."""
        record.generates = True
        self._recent.append(record)
        self.rows.begin(record)
        if self._keeps_text:
            record.text = KeptText()
        if self._tracing is not None:
            record.trace_context = {name: header(name) for name in ("traceparent", "tracestate")}

    def end(self, record: RequestRecord) -> None:
        """Counts a request that ended. One that generates also gets its log line and its spans."""
        self._metrics.requests.labels(record.endpoint, str(record.status)).inc()
        self._metrics.ignored_fields.inc(record.num_ignored_fields)
        if not record.generates:
            return
        record.ended = now = monotonic()
        took = phases(record, now)
        self._metrics.phases.add(took)
        first = first_attempt(record.attempts)
        self.rows.end(record, first)
        log.info(
            "request",
            endpoint=record.endpoint,
            status=record.status,
            key_id=record.key_id,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            generated_tokens=record.generated_tokens,
            finish_reason=record.finish_reason,
            attempts=record.attempts.number,
            workers=" ".join(first.workers.values()) if first else None,
            ttft_s=None if record.ttft_s is None else round(record.ttft_s, 6),
            duration_s=round(now - record.arrived, 6),
            phases_ms=" ".join([f"{name}={seconds * 1e3:.2f}" for name, seconds in took.items()]),
        )
        if self._tracing is not None:
            self._tracing.export(record)

    def recent(self) -> list[dict[str, object]]:
        """The recent requests in short, newest first, as JSON values."""
        return [_in_short(record) for record in reversed(self._recent)]

    def find(self, request_id: str) -> dict[str, object] | None:
        """All that is known of the newest request with this id, as JSON values; None: no recent one has it."""
        record = self.search(request_id)
        return None if record is None else describe_request(record)

    def search(self, request_id: str, number: int | None = None, key_id: str | None = None) -> RequestRecord | None:
        """The newest request with this id; None: none that is in flight or recent has it.

        key_id: of the key that it came with; None: any, or no key. number: of the one that is meant, among the requests
        of that key where one is given; None: any.
        """
        for record in chain(reversed(self._recent), reversed(self.rows.in_flight)):
            own = record.number if key_id is None else record.number_of_key
            if record.request_id == request_id and number in (None, own) and key_id in (None, record.key_id):
                return record
        return None


def _in_short(record: RequestRecord) -> dict[str, object]:
    first = first_attempt(record.attempts)
    until = monotonic() if record.ended is None else record.ended
    return {
        "request_id": record.request_id,
        "arrived_at": round(record.arrived_at, 6),
        "endpoint": record.endpoint,
        "in_flight": record.ended is None,
        "status": record.status or None,
        "error": record.error,
        "key_id": record.key_id,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "generated_tokens": record.generated_tokens,
        "finish_reason": record.finish_reason,
        "ttft_ms": None if record.ttft_s is None else _ms(record.ttft_s),
        "duration_ms": _ms(until - record.arrived),
        "num_attempts": record.attempts.number,
        "workers": {role.value: address for role, address in first.workers.items()} if first else None,
    }


def describe_request(record: RequestRecord) -> dict[str, Any]:
    """All that is known of a request, as JSON values."""
    moments = {
        "parsed": record.parsed,
        "tokenized": record.tokenized,
        "first_token": record.first_token,
        "ended": record.ended,
    }
    return {
        **_in_short(record),
        "number": record.number,
        "model": record.model,
        "ttft_slo_ms": None if record.ttft_slo_s is None else _ms(record.ttft_slo_s),
        "text": None if record.text is None else record.text.describe(),
        "phases_ms": _milliseconds(phases(record, monotonic())),
        "at_ms": _since(record.arrived, moments),
        "attempts": [_attempt(attempt, record.arrived) for attempt in record.attempts],
    }


def _attempt(attempt: AttemptRecord, arrived: float) -> dict[str, object]:
    moments = {
        "look_up_began": attempt.look_up_began,
        "looked_up": attempt.looked_up,
        "sent": attempt.sent_at,
        "first_token": attempt.first_token,
        "second_worker": attempt.second_worker,
    }
    workers = []
    for role, address in attempt.workers.items():
        there = attempt.at.get(role)
        names = ("received", "announced", "admitted", "ready", "sent")
        workers.append(
            {
                "role": role.value,
                "worker": address,
                "cached_tokens": {"predicted": attempt.predicted.get(role), "found": attempt.found.get(role)},
                "at_ms": _since(arrived, {name: getattr(there, name) for name in names}) if there else None,
                "wire_ms": _ms(there.wire_s) if there else None,
                **_moved(there.moved if there else Moved()),
            }
        )
    return {
        "number": attempt.number,
        "choices": list(attempt.choices),
        "num_tokens": attempt.num_tokens,
        "at_ms": _since(arrived, moments),
        "workers": workers,
        "failure": attempt.failure or None,
        "ends": [
            {"choice": end.choice, "reason": end.reason, "tokens": end.tokens, "at_ms": _ms(end.at - arrived)}
            for end in attempt.ends
        ],
        **({} if attempt.decision is None else attempt.decision.describe()),
    }


def _moved(moved: Moved) -> dict[str, object]:
    return {
        "transport": moved.transport or None,
        "why_transport": moved.why or None,
        "kv_bytes": moved.num_bytes,
        "reading_ms": _ms(moved.reading_s),
    }


def _since(arrived: float, moments: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: None if moment is None else _ms(moment - arrived) for name, moment in moments.items()}


def _milliseconds(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: _ms(value) for name, value in seconds.items()}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
