"""Parts of what a console costs a gateway, without a gateway: a turn of the feed, a row, the note of a prefix."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
from prometheus_client import CollectorRegistry

from loadtest.compare.servers import MODEL_NAME
from loadtest.tables import Record
from services.config import WorkerRole
from services.gateway.api.records.attempt_record import AttemptRecord, Ended
from services.gateway.api.records.request_record import RequestRecord
from services.gateway.api.records.request_records import RequestRecords
from services.gateway.api.records.request_rows import RequestRows
from services.gateway.console.feed import Feed
from services.gateway.console.listener import Listener
from services.gateway.console.sources import Sources
from services.gateway.console.view import EVERYTHING
from services.gateway.dispatch.prefix_hits import PrefixHits
from services.gateway.metrics import GatewayMetrics
from services.gateway.overview import BlockUse, DispatchOverview, PrefixHit, WorkerOverview, WorkerState
from services.protocol.block_hash import block_hashes, root_hash

_ALONE = 2000  # of what is done once a request, in one run
_RUNS = 20
_ENDING = 30  # requests in a turn


def parts_alone(in_flight: int, listeners: Sequence[int]) -> list[Record]:
    """Measures each part. in_flight: requests while a turn is taken; listeners: how many, in turn."""
    records = [_ended_record() for _ in range(_ALONE)]
    chain = block_hashes(root_hash("micro"), np.arange(1024, dtype=np.int32), 16)

    def rows() -> None:
        kept = RequestRows()
        for record in records:
            kept.begin(record)
            kept.end(record, record.attempts.last)

    def hits() -> None:
        noted = PrefixHits()
        for number in range(_ALONE):
            noted.note(chain[number % len(chain)], 1024, "127.0.0.1:9200")

    parts = {"a row of a request that ends": rows, "the note of a prefix": hits}
    alone: list[Record] = [{"what": name, "cpu_us": _fastest_us(part) / _ALONE} for name, part in parts.items()]
    for number in listeners:
        alone.append({"what": f"a turn, {number} consoles", "cpu_us": _fastest_us(_Turns(in_flight, number))})
    return alone


class _Turns:
    """Takes a turn of a feed in which requests end and begin, for so many listeners, whose clients read at once."""

    def __init__(self, in_flight: int, listeners: int) -> None:
        metrics = GatewayMetrics(CollectorRegistry())
        records = RequestRecords(metrics)
        self._rows = records.rows
        self._feed = Feed(Sources(dispatch=_Fleet(), records=records, metrics=metrics, model_names=(MODEL_NAME,)))
        for _ in range(in_flight):
            self._begin()
        self._open = ExitStack()
        for _ in range(listeners):
            listener = Listener(_Reader(), EVERYTHING, lambda: True, leaves_early=False)
            self._open.enter_context(self._feed.listening(listener))
            while self._feed.next_parts(listener, dict):
                """It is told all that there was."""

    def __call__(self) -> None:
        """Takes one turn."""
        for record in list(self._rows.in_flight)[:_ENDING]:
            record.ended = record.arrived + 1
            self._rows.end(record, record.attempts.last)
            self._begin()
        self._feed.take_turn()

    def _begin(self) -> None:
        record = _ended_record()
        record.ended = None
        self._rows.begin(record)


class _Reader:
    """A StreamWriter to a client that reads at once."""

    def ready(self) -> bool:
        """Returns True."""
        return True

    def write(self, events: bytes) -> None:
        """Drops the events."""


class _Fleet:
    """An Overseen of 16 workers."""

    def gateway_id(self) -> str:
        """See Overseen."""
        return "aa"

    def overview(self) -> DispatchOverview:
        """See Overseen."""
        workers = [
            WorkerOverview(
                address=f"127.0.0.1:{9200 + number}",
                state=WorkerState.OK,
                why=None,
                since=0.0,
                restarted=0,
                described={
                    "incarnation": number,
                    "role": "decode",
                    "transports": ["nixl", "grpc"],
                    "num_blocks": 20_000,
                },
                blocks=BlockUse(100, 20_000, 0),
                computed_tokens=0,
                evicted_blocks=0,
            )
            for number in range(16)
        ]
        return DispatchOverview(gateway="0" * 16, ready=True, draining=False, waiting=0, workers=workers, avoided=())

    def watch_prefixes(self, on: bool) -> None:
        """See Overseen."""

    def prefix_hits(self) -> tuple[float, Sequence[PrefixHit]]:
        """See Overseen."""
        return 0.0, ()


def _fastest_us(call: Callable[[], None]) -> float:
    took = []
    for _ in range(_RUNS):
        start = time.process_time()
        call()
        took.append(time.process_time() - start)
    return min(took) * 1e6


def _ended_record() -> RequestRecord:
    """Returns the record of a request that a pair has answered."""
    record = RequestRecord("f87981579573ce97a57d1844b0ded709", "chat.completions", generates=True, status=200)
    record.model, record.prompt_tokens, record.cached_tokens, record.generated_tokens = MODEL_NAME, 1200, 1024, 128
    record.finish_reason, record.first_token, record.ended = "length", record.arrived + 0.25, record.arrived + 1.5
    workers = {WorkerRole.PREFILL: "127.0.0.1:9100", WorkerRole.DECODE: "127.0.0.1:9200"}
    attempt = AttemptRecord(1, [0], 1200, workers, WorkerRole.PREFILL, {}, record.arrived)
    attempt.first_token = record.first_token
    attempt.ends.append(Ended(0, "finished", 128, record.arrived + 1.5))
    record.attempts.add(attempt)
    return record
