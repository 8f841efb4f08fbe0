"""A feed that nobody measured: as many requests, workers and handoffs as a test wants, without running them.

Its form is that of the gateway's own feed, which test_made_up.py holds it to. `tests/console` shows it to a browser
where a real stack would take minutes to get there: thousands of requests, dozens of workers, an hour of history.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from services.gateway.console.server_events import ROWS_AT_ONCE

Json = dict[str, Any]

STEP_S = 5
BOUNDS = [0.001 * 1.2**power for power in range(73)]
MODEL, KEYS = "baton-demo", ("acme-1", "other-1", None)


@dataclass
class MadeUpFeed:
    """A fleet of so many workers with a past, which goes on at `next_second`. The same seed makes the same feed."""

    now: float
    num_prefill: int = 2
    num_decode: int = 3
    num_requests: int = 300
    has_plotly: bool = True
    draw: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        pairs = product(self.prefill, self.decode)
        self.links = {pair: self._link(*pair) for pair in pairs}
        self._number = 0

    @property
    def prefill(self) -> Sequence[str]:
        """Addresses of prefill workers."""
        return [f"10.0.4.{11 + index}:7101" for index in range(self.num_prefill)]

    @property
    def decode(self) -> Sequence[str]:
        """Addresses of decode workers."""
        return [f"10.0.5.{11 + index}:7201" for index in range(self.num_decode)]

    def about(self) -> Json:
        """What /console/about says."""
        return {
            "version": "0.1.0",
            "gateway": "7f3a",
            "pid": 4711,
            "models": [MODEL],
            "sees": "all",
            "key_id": None,
            "has_plotly": self.has_plotly,
            "api": "api/v1",
            "text": False,
            "kept_requests": self.num_requests,
            "kept_records": 512,
            "slo": {"ttft_s": 0.5},
        }

    def beginning(self) -> Iterator[tuple[str, Json]]:
        """The first events of a stream: an hour of samples, and all requests but those in flight."""
        rows = [self.row(self.now - 2 - number * 0.7) for number in range(self.num_requests, 0, -1)][::-1]
        yield "hello", self.hello(rows[:ROWS_AT_ONCE])
        for first in range(ROWS_AT_ONCE, len(rows), ROWS_AT_ONCE):
            yield "requests", {"rows": rows[first : first + ROWS_AT_ONCE]}
        yield "prefixes", self._prefixes_event()
        yield "tick", self.tick()

    def hello(self, rows: Sequence[Json]) -> Json:
        """The first event. rows: the newest requests, newest first."""
        hour = [self.sample(self.now - STEP_S * (720 - number)) for number in range(720)]
        history = {"step_s": STEP_S, "bounds": dict.fromkeys(("ttft", "itl", "e2e", "queue"), BOUNDS), "samples": hour}
        events = [
            {"at": self.now - 900, "kind": "worker_up", "name": self.decode[0], "text": "decode worker connected"},
            {"at": self.now - 320, "kind": "handoff_failed", "name": self.prefill[0], "text": "failed_deadline"},
            {"at": self.now - 60, "kind": "draining", "name": self.decode[-1], "text": "it takes no new work"},
        ]
        return {**self.about(), "now": self.now, "history": history, "requests": [*rows], "events": events}

    def next_second(self) -> Iterator[tuple[str, Json]]:
        """The events of the second that passes now, each with its name."""
        self.now += 1
        yield "requests", {"rows": [self.row(self.now, in_flight=True), self.row(self.now - 1)]}
        for link in self.links.values():
            handoffs = self.draw.choice((0, 1, 1, 2, 5))
            link["handoffs"] += handoffs
            link["bytes"] += handoffs * self.draw.randrange(1 << 20, 40 << 20)
        yield "tick", self.tick()
        if int(self.now) % STEP_S == 0:
            yield "sample", self.sample(self.now)
            yield "prefixes", self._prefixes_event()

    def _prefixes_event(self) -> Json:
        return {"now": self.now, "since": self.now - 300, "prefixes": self.prefixes()}

    def tick(self) -> Json:
        """The state of the fleet: one worker drains, one is gone, one link is avoided."""
        workers = [self._worker(address, "prefill") for address in self.prefill]
        workers += [self._worker(address, "decode") for address in self.decode]
        workers[-1].update(state="draining", draining=True, why="it takes no new work, and ends soon")
        workers[0].update(state="gone", why="its stream broke", detail="UNAVAILABLE: Socket closed", since=self.now - 7)
        problem = {"what": "worker", "name": workers[0]["address"], "why": "its stream broke", "since": self.now - 7}
        gateway = {"id": "7f3a", "pid": 4711, "version": "0.1.0", "protocol": "1.3", "in_flight": 7, "waiting": 1}
        gateway |= {"uptime_s": 8123.0, "draining": False, "cpu_s": self.now % 1e5 * 0.3, "rss_bytes": 190 << 20}
        return {
            "now": self.now,
            "gateway": {**gateway, "loop_pause_ms": 3.2},
            "gateways": {"known": 2},
            "redis": {"state": "ok", "why": None, "since": self.now - 8000},
            "workers": workers,
            "links": [*self.links.values()],
            "unhealthy": [problem],
        }

    def _worker(self, address: str, role: str) -> Json:
        used = int(700 + 500 * math.sin(self.now / 30 + len(address) + sum(map(ord, address))))
        return {
            "address": address,
            "incarnation": f"{sum(map(ord, address)):016x}",
            "role": role,
            "fingerprint": "5c1e",
            "state": "ok",
            "why": None,
            "detail": None,
            "since": self.now - 5000,
            "restarted": 0,
            "protocol": "1.3",
            "kernels": "avx512_bf16",
            "running": self.draw.randrange(9),
            "waiting": self.draw.randrange(3),
            "draining": False,
            "available_blocks": 2008 - max(0, used),
            "quarantined_blocks": 40,
            "kv_token_bytes": 16_384,
            "weight_bytes": 269_000_000,
            "shares_weights": True,
            "num_ranks": 1,
            "num_blocks": 2048,
            "vocab_size": 32_000,
            "knows": [],
            "clock_lead_s": 0.0,
            "worst_expert_imbalance": None,
            "mean_expert_imbalance": None,
            "worst_rank_imbalance": None,
            "mean_rank_imbalance": None,
            "slowest_rank": None,
            "waited_for_slowest_rank": None,
            "max_num_seqs": 64,
            "max_model_len": 8192,
            "block_size": 16,
            "transports": ["nixl", "grpc"],
            "kv": {"device": {"used": max(0, used), "total": 2048, "quarantined": 40}},
            "tokens_per_s": self.draw.random() * 400,
        }

    def _link(self, prefill: str, decode: str) -> Json:
        avoided = (prefill, decode) == (self.prefill[-1], self.decode[0])
        link = {"prefill": prefill, "decode": decode, "transport": "nixl", "why": "both hosts share memory"}
        return {**link, "handoffs": 900, "failed": 1, "bytes": 9 << 30, "reading_s": 12.0, "avoided": avoided}

    def row(self, at: float, *, in_flight: bool = False) -> Json:
        """A request that arrived then."""
        self._number += 1
        prompt = self.draw.randrange(20, 4000)
        ttft = self.draw.lognormvariate(-1.6, 0.8) * 1e3
        failed = not in_flight and self.draw.random() < 0.04
        row: Json = {
            "n": self._number,
            "id": f"{self.draw.getrandbits(128):032x}",
            "at": at,
            "endpoint": "chat.completions",
            "model": MODEL,
            "key": KEYS[self._number % 3],
            "prompt": prompt,
            "cached": prompt // 32 * 16 if self._number % 2 else 0,
            "attempts": 1 + (self._number % 17 == 0),
            "ttft_ms": ttft,
            "workers": {"prefill": self.draw.choice(self.prefill), "decode": self.draw.choice(self.decode)},
        }
        if in_flight:
            under_way = {"state": "in flight", "phase": "decode", "status": None, "error": None, "finish": None}
            return {**row, **under_way, "generated": None, "ms": None}
        ended = {"state": "failed", "status": 503, "error": "service_unavailable", "finish": None}
        ended = ended if failed else {"state": "done", "status": 200, "error": None, "finish": "stop"}
        return {**row, **ended, "phase": None, "generated": self.draw.randrange(1, 400), "ms": ttft * 6}

    def sample(self, at: float) -> Json:
        """The figures of some seconds."""
        wave = 1 + 0.5 * math.sin(at / 400)
        prompt = int(4000 * wave)
        counted = {name: self._counts(scale * wave, 60) for name, scale in _SCALES.items()}
        sums = {name: 60 * scale * wave * math.exp(0.6**2 / 2) for name, scale in _SCALES.items()}
        return {
            "at": at,
            "s": STEP_S,
            "requests": {"ok": 58, "failed": 1, "refused": 1, "left": 0},
            "prompt_tokens": prompt,
            "cached_tokens": int(prompt * (0.5 + 0.2 * math.sin(at / 250))),
            "generated_tokens": 2100,
            **counted,
            "sums": sums,
            "in_flight": 7,
            "waiting": 1,
            "kv_used": {address: 0.5 + 0.3 * math.sin(at / 300 + index) for index, address in enumerate(self.decode)},
            "handoffs": 40,
            "handoff_failed": 0,
            "kv_bytes": 400 << 20,
            "ttft_slo_met": 55,
            "ttft_slo_total": 60,
            "evicted_blocks": self.draw.randrange(40),
        }

    def _counts(self, typical_s: float, number: int) -> list[int]:
        counts = [0] * (len(BOUNDS) + 1)
        for _ in range(number):
            value = typical_s * self.draw.lognormvariate(0, 0.6)
            counts[bisect_left(BOUNDS, value)] += 1
        return counts

    def prefixes(self) -> list[Json]:
        """Shared prefixes, the largest saving first."""
        found = [
            {"name": f"{self.draw.getrandbits(64):016x}", "tokens": 1024 >> index, "uses": 90 - 9 * index}
            | {"saved_tokens": (1024 >> index) * (89 - 9 * index), "workers": list(self.decode[: 1 + index % 3])}
            for index in range(7)
        ]
        return sorted(found, key=lambda prefix: -prefix["saved_tokens"])


_SCALES = {"ttft": 0.18, "itl": 0.02, "e2e": 2.5, "queue": 0.01}
