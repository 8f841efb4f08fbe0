"""OpenTelemetry spans of requests, made from their records when they end, and sent over HTTP by OTLP.

Set up by the standard environment variables alone. Needs the extra `otel`; without a variable nothing is imported.
"""

import os
import time
from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING

from services.gateway.api.records.attempt_record import AttemptRecord
from services.gateway.api.records.request_phases import intervals, phases
from services.gateway.api.records.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.util.types import AttributeValue

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_ONE_AFTER_ANOTHER = ("read", "tokenize", "wait", "lookup", "place")


class TracingError(Exception):
    """Spans are wanted and cannot be made. The message is one line, for the person who set the variables."""


def tracing_from(environment: Mapping[str, str] = os.environ) -> "Tracing | None":
    """Returns what makes spans; None: the environment names no place for them. Raises TracingError."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporter == "none" or not (exporter or any(environment.get(name) for name in _ENDPOINTS)):
        return None
    if exporter not in ("", "otlp"):
        raise TracingError(f"OTEL_TRACES_EXPORTER is {exporter}; spans are sent by otlp alone")
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        raise TracingError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}; spans are sent by http/protobuf alone")
    try:
        return Tracing()
    except ImportError as error:
        raise TracingError("spans need OpenTelemetry: pip install 'baton-serve[otel]'") from error


class Tracing:
    """Makes the spans of requests. A thread of the SDK's sends them."""

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = Resource.create()  # by OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(named.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            named = named.merge(Resource({SERVICE_NAME: "baton-gateway"}))
        self._provider = TracerProvider(resource=named)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("baton")
        self._propagator = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()

    def export(self, record: RequestRecord) -> None:
        """Makes the spans of a request that ended: its own, its phases in the gateway, its attempts, their workers."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        assert record.ended is not None
        client = self._propagator.extract(record.trace_context or {})
        attributes: dict[str, AttributeValue] = {
            "baton.request_id": record.request_id,
            "baton.status": str(record.status),
            "baton.num_attempts": record.attempts.number,
        }
        counts = {"input": record.prompt_tokens, "output": record.generated_tokens, "cached": record.cached_tokens}
        for name, count in counts.items():
            if count is not None:
                attributes[f"gen_ai.usage.{name}_tokens"] = count
        if record.ttft_s is not None:
            attributes["baton.ttft_s"] = record.ttft_s
        clock = _WallClock()
        root = self._tracer.start_span(
            record.endpoint, client, SpanKind.SERVER, attributes, start_time=clock.at(record.arrived)
        )
        if record.error is not None:
            root.set_status(Status(StatusCode.ERROR, record.error))
        inner = set_span_in_context(root)
        begin, took = record.arrived, phases(record, record.ended)
        for name in _ONE_AFTER_ANOTHER:
            if name in took:
                self._span(name, inner, clock, begin, begin + took[name], {})
                begin += took[name]
        if record.first_token is not None:
            self._span("generate", inner, clock, record.first_token, record.ended, {})
        for attempt in record.attempts:
            self._export_attempt(attempt, inner, clock, record.ended)
        root.end(clock.at(record.ended))

    def _export_attempt(self, attempt: AttemptRecord, parent: "Context", clock: "_WallClock", until: float) -> None:
        from opentelemetry.trace import set_span_in_context

        attributes: dict[str, AttributeValue] = {"baton.attempt": attempt.number}
        for role, address in attempt.workers.items():
            attributes[f"baton.{role.value}"] = address
        attributes["baton.ends"] = sorted({end.reason for end in attempt.ends})
        span = self._tracer.start_span("attempt", parent, attributes=attributes, start_time=clock.at(attempt.sent_at))
        inner = set_span_in_context(span)
        for role_name, address, (name, begin, end) in intervals(attempt):
            self._span(f"{role_name} {name}", inner, clock, begin, end, {"server.address": address})
        if attempt.first_token is not None and attempt.second_worker is not None:
            self._span("handoff", inner, clock, attempt.first_token, attempt.second_worker, {})
        span.end(clock.at(max((end.at for end in attempt.ends), default=until)))

    def _span(
        self,
        name: str,
        parent: "Context",
        clock: "_WallClock",
        begin: float,
        end: float,
        attributes: "dict[str, AttributeValue]",
    ) -> None:
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=clock.at(begin))
        span.end(clock.at(end))


class _WallClock:
    """Nanoseconds since 1970 of moments of `time.monotonic`, by one reading of both clocks."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - round(monotonic() * 1e9)

    def at(self, moment: float) -> int:
        """The nanoseconds since 1970."""
        return self._offset_ns + round(moment * 1e9)
