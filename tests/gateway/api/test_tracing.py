"""Spans of requests, as an OTLP collector gets them."""

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvtransfer.moved import Moved
from services.config import WorkerRole
from services.gateway.api.records.attempt_record import AttemptRecord, AttemptRecords, AtWorker, Ended
from services.gateway.api.records.request_record import RequestRecord
from services.gateway.api.records.tracing import TracingError, tracing_from

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A collector that the environment names, and the spans that it got."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {each.key: each.value.string_value for each in resource.resource.attributes}
                assert names["service.name"] == "baton-gateway"
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        yield spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def a_record(arrived: float) -> RequestRecord:
    """A request that a pair served within ten seconds, the last of them at `arrived` + 10."""
    attempt = AttemptRecord(
        number=1,
        choices=[0],
        num_tokens=9,
        workers={WorkerRole.PREFILL: "p:1", WorkerRole.DECODE: "d:1"},
        computes=WorkerRole.PREFILL,
        predicted={},
        sent_at=arrived + 2,
        look_up_began=arrived + 1,
        looked_up=arrived + 1.5,
        first_token=arrived + 4,
        second_worker=arrived + 5,
        ends=[Ended(0, "finished", 7, arrived + 9)],
    )
    attempt.at[WorkerRole.PREFILL] = AtWorker(arrived + 2.1, None, arrived + 2.5, None, arrived + 3.9, 0.2, Moved())
    attempt.at[WorkerRole.DECODE] = AtWorker(
        arrived + 2.1, arrived + 3, arrived + 3.5, arrived + 4.5, arrived + 4.9, 0.2, Moved("nixl")
    )
    attempts = AttemptRecords()
    attempts.add(attempt)
    return RequestRecord(
        "r1",
        "completions",
        generates=True,
        status=200,
        prompt_tokens=9,
        generated_tokens=7,
        attempts=attempts,
        arrived=arrived,
        parsed=arrived + 0.25,
        tokenized=arrived + 0.75,
        first_token=arrived + 4,
        ended=arrived + 10,
        trace_context={"traceparent": f"00-{TRACE}-{CLIENT}-01", "tracestate": ""},
    )


def test_a_request_s_spans_are_children_of_the_client_s_and_reach_both_workers(collector: list[Any]):
    tracing = tracing_from()
    assert tracing is not None
    arrived = monotonic() - 10
    tracing.export(a_record(arrived))
    tracing.close()
    by_name = {span.name: span for span in collector}
    assert len(by_name) == len(collector)
    assert {span.trace_id.hex() for span in collector} == {TRACE}
    root, attempt = by_name["completions"], by_name["attempt"]
    assert root.parent_span_id.hex() == CLIENT

    def lasts(name: str) -> tuple[float, float]:
        span = by_name[name]
        begin_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
        return (begin_ns - root.start_time_unix_nano) / 1e9, (end_ns - root.start_time_unix_nano) / 1e9

    in_gateway = {"read": (0, 0.25), "tokenize": (0.25, 0.75), "wait": (0.75, 1), "lookup": (1, 1.5), "place": (1.5, 2)}
    in_gateway |= {"generate": (4, 10), "attempt": (2, 9)}
    at_workers = {"prefill queue": (2.1, 2.5), "prefill prefill": (2.5, 3.9), "decode wait for blocks": (2.1, 3)}
    at_workers |= {"decode queue": (3, 3.5), "decode read": (3.5, 4.5), "decode join": (4.5, 4.9), "handoff": (4, 5)}
    for parent, expected in ((root, in_gateway), (attempt, at_workers)):
        for name, times in expected.items():
            assert lasts(name) == pytest.approx(times, abs=1e-6), name
            assert by_name[name].parent_span_id == parent.span_id
    assert lasts("completions") == pytest.approx((0, 10), abs=1e-6)
    assert by_name.keys() == {"completions"} | in_gateway.keys() | at_workers.keys()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"},
    ],
)
def test_without_a_place_for_them_there_are_no_spans(environment: dict[str, str]):
    assert tracing_from(environment) is None


@pytest.mark.parametrize(
    "environment",
    [{"OTEL_TRACES_EXPORTER": "zipkin"}, {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}],
)
def test_spans_that_cannot_be_sent_as_wanted_are_refused_in_words(environment: dict[str, str]):
    with pytest.raises(TracingError, match="spans are sent by"):
        tracing_from(environment)
