"""The gateway's Prometheus metrics. Names, labels and buckets are here and nowhere else.

The registry is the caller's.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvtransfer.messages import EndReason
from kvtransfer.moved import Moved
from services.config import WorkerRole
from services.prefix_index.malformed import MalformedEntries
from services.process.gc_watch import GcWatch
from services.process.log_writer import LogWriter
from services.protocol.frames import Load
from services.protocol.messages import WorkerHello

PairNames = tuple[str, str]  # the addresses of a prefill and a decode worker

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_LOAD_GAUGES = {  # by field of Load
    "available_blocks": ("baton_blocks_available", "Free or evictable blocks."),
    "quarantined_blocks": ("baton_blocks_quarantined", "Blocks out of use."),
    "running": ("baton_worker_running", "Sequences in its batch."),
    "waiting": ("baton_worker_waiting", "Sequences in its queue."),
    "draining": ("baton_worker_draining", "1: it takes no new work, and ends soon."),
    "computed_tokens": ("baton_worker_computed_tokens", "Tokens that its steps computed since it started."),
    "not_finite": ("baton_worker_not_finite", "Requests since it started whose numbers were not finite."),
    "evicted_blocks": ("baton_worker_evicted_blocks", "Cached blocks since it started whose room was needed."),
    "worst_expert_imbalance": (
        "baton_worker_worst_expert_imbalance",
        "Tokens of the busiest expert over the mean, in the last minute, of the layer where this is highest.",
    ),
    "mean_expert_imbalance": (
        "baton_worker_mean_expert_imbalance",
        "Tokens of the busiest expert over the mean, in the last minute, mean over the layers.",
    ),
    "slowest_rank": (
        "baton_worker_slowest_rank",
        "Of a model on several ranks: the one that the others waited for in the last minute of steps.",
    ),
    "waited_for_slowest_rank": (
        "baton_worker_waited_for_slowest_rank",
        "Share of steps, in their last minute, for which the other ranks waited for the slowest.",
    ),
    "worst_rank_imbalance": (
        "baton_worker_worst_rank_imbalance",
        "Pairs of the rank with the busiest experts over the mean, in the last minute, of the worst layer.",
    ),
    "mean_rank_imbalance": (
        "baton_worker_mean_rank_imbalance",
        "Pairs of the rank with the busiest experts over the mean, in the last minute, mean over the layers.",
    ),
    "gc_collections": ("baton_worker_gc_collections", "Garbage collections since it started."),
    "gc_pause_us": ("baton_worker_gc_pause_microseconds", "How long they stopped it, in all."),
}
_WORKER_INFO = "1 for each worker; kernels: what computes its steps, a class of processors, torch or cuda."
_WORKER_REFUSED = "1 for each worker that does not fit this gateway, as one of another model, and why."
_PAIR_TRANSPORT = "1 for each pair of workers: by which transport its last handoff moved blocks, and why by this one."
_PAIR_HANDOFFS = "Attempts at a pair of live workers, by their end: completed, or failed."
_PAIR_TOTALS = {  # by field of Moved
    "num_bytes": ("baton_pair_kv_bytes", "KV bytes that the decode worker of a pair read from its prefill worker."),
    "reading_s": ("baton_pair_reading_seconds", "Time of handoffs in which such reads were open, added up."),
}
_PHASE_BUCKETS = (0.0002, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_PAUSE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)
# The phases of a request. `services/gateway/api/records/request_phases.py` says what they are.
PHASES = (
    *("read", "tokenize", "wait", "lookup", "place", "wire", "queue", "prefill", "deliver"),
    *("handoff", "generate"),
)
# Between a thousandth of a second and ten minutes, each a fifth above the one before.
_FINE_BOUNDS = tuple(float(f"{0.001 * 1.2**step:.4g}") for step in range(74))
_DURATION_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class GatewayMetrics:
    """The metrics of the API side (requests, tokens, times) and of the dispatch side (handoffs, workers)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter("baton_requests", "Finished requests.", ["endpoint", "status"], registry=registry)
        self.in_flight = Gauge("baton_requests_in_flight", "Requests of clients being answered.", registry=registry)
        self.ignored_fields = Counter(
            "baton_ignored_fields", "Fields of requests that nothing acts on.", registry=registry
        )
        self.prompt_tokens = Counter("baton_prompt_tokens", "Tokens of accepted prompts.", registry=registry)
        self.prompt_cached = Counter(
            "baton_cached_tokens", "Prompt tokens that no attempt computed.", registry=registry
        )
        self.ttft = Times("baton_ttft_seconds", "From a request's arrival to its first token.", _TTFT_BUCKETS)
        registry.register(self.ttft)
        self.tokens = TokenMetrics()
        registry.register(self.tokens)
        self.duration = Times("baton_e2e_seconds", "Whole requests.", _DURATION_BUCKETS)
        registry.register(self.duration)
        self.phases = PhaseMetrics()
        registry.register(self.phases)
        about = "Requests refused before any work was done."
        self._refusals = Counter("baton_admission_refusals", about, ["cause"], registry=registry)
        self._attempts = Counter("baton_attempts", "Requests sent to a worker or pair.", registry=registry)
        about = "Attempts at one choice each, by their end."
        self._ends = Counter("baton_attempt_ends", about, ["reason"], registry=registry)
        about = "Where requests were sent, and what decided it."
        self._plans = Counter("baton_plans", about, ["plan", "why"], registry=registry)
        self.handoffs = Counter("baton_handoffs", "Attempts at a pair, by their end.", ["outcome"], registry=registry)
        about = "Handoffs that a worker reported as failed, by its reason."
        self._handoff_failures = Counter("baton_handoff_failures", about, ["reason"], registry=registry)
        self._predicted = Counter("baton_cached_tokens_predicted", "Promised by the prefix index.", registry=registry)
        self._actual = Counter("baton_cached_tokens_actual", "Found by the workers, of the same.", registry=registry)
        self.moved = Counter("baton_kv_bytes_moved", "KV bytes read from other workers.", registry=registry)
        self._loads = WorkerLoads()
        registry.register(self._loads)
        self.pairs = PairHandoffs()
        registry.register(self.pairs)

    def num_in_flight(self) -> int:
        """Counts the requests that are being answered."""
        return int(next(iter(next(iter(self.in_flight.collect())).samples)).value)

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def refused(self, cause: str) -> None:
        """Counts a request that was refused before any work. `cause` is a Refusal."""
        self._refusals.labels(cause).inc()

    def show_limits(self, num_gateways: Callable[[], int], alone: Callable[[], bool]) -> None:
        """Adds what `RedisQuotas` says of itself."""
        about = "Gateways that share the limits of keys, as Redis last said."
        Gauge("baton_limits_gateways", about, registry=self.registry).set_function(num_gateways)
        about = "1: Redis does not answer, and this gateway counts its part of the limits of keys."
        Gauge("baton_limits_alone", about, registry=self.registry).set_function(alone)

    # The dispatch side's observer

    def attempt_started(self) -> None:
        """See LedgerObserver."""
        self._attempts.inc()

    def attempt_ended(self, reason: str) -> None:
        """See LedgerObserver."""
        self._ends.labels(reason).inc()

    def blocks_moved(self, prefill: str, decode: str, moved: Moved) -> None:
        """See LedgerObserver."""
        self.pairs.add((prefill, decode), moved)

    def handoff_ended(self, outcome: str, pair: PairNames) -> None:
        """See LedgerObserver."""
        self.handoffs.labels(outcome).inc()
        self.pairs.note_ended(pair, outcome)

    def handoff_failed(self, reason: EndReason, pair: PairNames) -> None:
        """See LedgerObserver."""
        self._handoff_failures.labels(reason.name.lower()).inc()
        self.pairs.note_failed(pair, reason)

    def cached_tokens(self, predicted: int, actual: int) -> None:
        """See LedgerObserver."""
        self._predicted.inc(predicted)
        self._actual.inc(actual)

    def worker_up(self, worker: str, hello: WorkerHello) -> None:
        """See DispatchObserver."""
        self._loads.kernels[worker, hello.role] = hello.kernels

    def worker_load(self, worker: str, role: WorkerRole, load: Load) -> None:
        """See DispatchObserver."""
        self._loads.latest[worker, role] = load

    def worker_gone(self, worker: str, role: WorkerRole) -> None:
        """See DispatchObserver."""
        self._loads.kernels.pop((worker, role), None)
        self._loads.latest.pop((worker, role), None)
        self.pairs.remove_worker(worker)

    def planned(self, workers: str, why: str) -> None:
        """See PlacementObserver."""
        self._plans.labels(workers, why).inc()

    def kv_bytes_moved(self, count: int) -> None:
        """See DispatchObserver."""
        self.moved.inc(count)


class ProcessMetrics:
    """The metrics of the gateway's own process."""

    def __init__(
        self, registry: CollectorRegistry, collections: GcWatch, malformed: MalformedEntries, log_writer: LogWriter
    ) -> None:
        self._registry = registry
        about = "How late a timer of the gateway's event loop was, ten times a second."
        self._loop_pauses = _seconds("baton_gateway_loop_pause_seconds", about, _PAUSE_BUCKETS, registry)
        self._longest_pause_s = 0.0
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "baton_gateway_gc_collections": (
                "Garbage collections since it started.",
                lambda: collections.num_collections,
            ),
            "baton_gateway_gc_pause_microseconds": (
                "How long they stopped it, in all.",
                lambda: collections.pause_s * 1e6,
            ),
            "baton_gateway_log_lines_dropped": (
                "Log lines that could not be written.",
                lambda: log_writer.num_dropped,
            ),
            "baton_index_malformed_entries": (
                "Entries in Redis that no worker writes, and that were skipped.",
                lambda: malformed.count,
            ),
        }
        for name, (what, value) in gauges.items():
            Gauge(name, what, registry=registry).set_function(value)

    def note_loop_pause(self, seconds: float) -> None:
        """Counts how late a timer of the event loop was."""
        self._loop_pauses.observe(seconds)
        self._longest_pause_s = max(self._longest_pause_s, seconds)

    def take_longest_pause_s(self) -> float:
        """Returns the longest of the pauses since the last call."""
        longest_s, self._longest_pause_s = self._longest_pause_s, 0.0
        return longest_s

    def show_followed(self, refused_s: Mapping[str, Callable[[], float]]) -> None:
        """Adds since when files that are followed are refused, by what they hold."""
        about = "Seconds since files were first refused; what they held before stays in use. 0: they are in use."
        gauge = Gauge("baton_files_refused_seconds", about, ["files"], registry=self._registry)
        for files, seconds in refused_s.items():
            gauge.labels(files).set_function(seconds)


class TokenMetrics(Collector):
    """The metrics that every token adds to. One thread both adds and reads, so there is no lock."""

    def __init__(self) -> None:
        self.generated = 0  # tokens, for clients
        self.gaps = Buckets(_ITL_BUCKETS)

    def note_token(self, gap_s: float) -> None:
        """Counts a token that came `gap_s` after the choice's last one."""
        self.generated += 1
        self.gaps.add(gap_s)

    def note_gap(self, seconds: float) -> None:
        """Counts the time between two deltas of one choice."""
        self.gaps.add(seconds)

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        yield CounterMetricFamily("baton_generated_tokens", "Tokens made for clients.", value=self.generated)
        what = "Between deltas of one request."
        yield HistogramMetricFamily("baton_itl_seconds", what, buckets=self.gaps.cumulated(), sum_value=self.gaps.total)


class PhaseMetrics(Collector):
    """The time that finished requests spent in each of their phases. One thread both adds and reads."""

    def __init__(self) -> None:
        self.by_name = {name: Buckets(_PHASE_BUCKETS, fine=name == "queue") for name in PHASES}

    def add(self, phases: Mapping[str, float]) -> None:
        """Counts the seconds of one request's phases."""
        for name, seconds in phases.items():
            self.by_name[name].add(seconds)

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        what = "Where the time of finished requests went."
        family = HistogramMetricFamily("baton_phase_seconds", what, labels=["phase"])
        for name, phase in self.by_name.items():
            family.add_metric([name], phase.cumulated(), phase.total)
        yield family


class Buckets:
    """A histogram that costs a tenth of the library's, for what one thread adds often.

    bounds: the upper ends of all buckets but the last, in order. counts: by bucket, one more than bounds.
    """

    def __init__(self, shown: tuple[float, ...], *, fine: bool = True) -> None:
        """shown: the bounds that Prometheus is shown, which are among all bounds.

        fine: it counts in finer buckets too, each a fifth wider than the one before, to make percentiles of.
        """
        self.bounds = tuple(sorted({*map(float, shown), *(_FINE_BOUNDS if fine else ())}))
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self._shown = shown

    def add(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulated(self) -> list[tuple[str, float]]:
        """Each bound that is shown, and how many values were not above it."""
        not_above = dict(zip((*self.bounds, inf), accumulate(self.counts), strict=True))
        bounds = (*self._shown, inf)
        return list(zip(map(floatToGoString, bounds), map(not_above.__getitem__, bounds), strict=True))


class Times(Collector):
    """A histogram of seconds. One thread both adds and reads."""

    def __init__(self, name: str, what: str, buckets: tuple[float, ...]) -> None:
        self.buckets = Buckets(buckets)
        self.observe = self.buckets.add
        self._name = name
        self._what = what

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        total = self.buckets.total
        yield HistogramMetricFamily(self._name, self._what, buckets=self.buckets.cumulated(), sum_value=total)


@dataclass(slots=True)
class PairFigures:
    """The handoffs of one pair so far. moved: the last way, and sums. last_failure: why the last one failed."""

    moved: Moved = field(default_factory=Moved)
    completed: int = 0
    failed: int = 0
    last_failure: str = ""


@dataclass(slots=True)
class PairFailures:
    """Handoffs of one pair that failed. last: why the last one did."""

    number: int = 0
    last: str = ""


class PairHandoffs(Collector):
    """The handoffs between pairs of live workers, by their addresses, and the reads, as decode workers told of them.

    Failures are also kept by themselves until they are taken, since a pair goes with its worker, whose loss may be one.
    """

    def __init__(self) -> None:
        self.by_pair: dict[PairNames, PairFigures] = {}
        self._failures: dict[PairNames, PairFailures] = {}  # that nobody has taken so far

    def add(self, pair: PairNames, moved: Moved) -> None:
        """Adds the reads of a handoff."""
        figures = self._of(pair)
        num_bytes, reading_s = figures.moved.num_bytes + moved.num_bytes, figures.moved.reading_s + moved.reading_s
        figures.moved = Moved(moved.transport, moved.why, num_bytes, reading_s)

    def note_ended(self, pair: PairNames, outcome: str) -> None:
        """Counts the end of an attempt at a pair, where it arrived or failed. outcome: a HandoffOutcome."""
        if outcome == "completed":
            self._of(pair).completed += 1
        elif outcome.startswith("failed_"):
            figures = self._of(pair)
            figures.failed += 1
            if outcome != "failed_handoff":  # of which a worker has said the reason
                figures.last_failure = outcome.removeprefix("failed_")
            failures = self._failures.setdefault(pair, PairFailures())
            failures.number, failures.last = failures.number + 1, figures.last_failure

    def take_failures(self) -> Mapping[PairNames, PairFailures]:
        """Returns the failures since the last call, also of pairs of which a worker is gone by now."""
        taken, self._failures = self._failures, {}
        return taken

    def note_failed(self, pair: PairNames, reason: EndReason) -> None:
        """Notes the reason of a failure, which a worker reports before the attempt ends."""
        self._of(pair).last_failure = reason.name

    def remove_worker(self, worker: str) -> None:
        """Removes the pairs of a worker that is gone."""
        for pair in [pair for pair in self.by_pair if worker in pair]:
            del self.by_pair[pair]

    def _of(self, pair: PairNames) -> PairFigures:
        if (figures := self.by_pair.get(pair)) is None:
            self.by_pair[pair] = figures = PairFigures()
        return figures

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        labels = ["prefill", "decode"]
        way = GaugeMetricFamily("baton_pair_transport", _PAIR_TRANSPORT, labels=[*labels, "transport", "why"])
        for pair, figures in self.by_pair.items():
            if figures.moved.transport:
                way.add_metric([*pair, figures.moved.transport, figures.moved.why], 1)
        yield way
        for total, (name, what) in _PAIR_TOTALS.items():
            family = CounterMetricFamily(name, what, labels=labels)
            for pair, figures in self.by_pair.items():
                if figures.moved.transport:
                    family.add_metric(list(pair), getattr(figures.moved, total))
            yield family
        family = CounterMetricFamily("baton_pair_handoffs", _PAIR_HANDOFFS, labels=[*labels, "outcome"])
        for pair, figures in self.by_pair.items():
            family.add_metric([*pair, "completed"], figures.completed)
            family.add_metric([*pair, "failed"], figures.failed)
        yield family


class RefusedWorkers(Collector):
    """The workers that do not fit a gateway, as it knows them when the metrics are read."""

    def __init__(self, refused: Callable[[], Mapping[str, str]]) -> None:
        """refused: returns the reason of each, by its address."""
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        family = GaugeMetricFamily("baton_worker_refused", _WORKER_REFUSED, labels=["worker", "why"])
        for worker, why in self._refused().items():
            family.add_metric([worker, why], 1)
        yield family


class WorkerLoads(Collector):
    """The last loads that live workers reported, which come with every frame: they become metrics only when read."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[str, WorkerRole], str] = {}  # see WorkerHello
        self.latest: dict[tuple[str, WorkerRole], Load] = {}

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        info = GaugeMetricFamily("baton_worker_info", _WORKER_INFO, labels=["worker", "role", "kernels"])
        for (worker, role), kernels in self.kernels.items():
            info.add_metric([worker, role.value, kernels], 1)
        yield info
        for figure, (name, what) in _LOAD_GAUGES.items():
            family = GaugeMetricFamily(name, what, labels=["worker", "role"])
            for (worker, role), load in self.latest.items():
                if (value := getattr(load, figure)) is not None:
                    family.add_metric([worker, role.value], value)
            yield family


def _seconds(name: str, what: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(name, what, buckets=buckets, registry=registry)
