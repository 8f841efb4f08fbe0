"""A running gateway, asked at its admin port: its clock, its workers, and how KV moved between them."""

import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from services.config import TransportName, WorkerRole
from services.doctor.clock import check_clock
from services.doctor.finding import Finding, error, note, ok, warning

_TIMEOUT_S = 2.0
_DATE_SPAN_S = 2.0  # a Date header has whole seconds, and a server may make it once a second
_PAIR_METRIC = "baton_pair_transport"

Worker = Mapping[str, Any]  # as /debug/ledger has it


@dataclass(frozen=True, slots=True)
class PairTransport:
    """The transport of the last handoff of two workers."""

    prefill: str
    decode: str
    transport: str


async def check_gateway(url: str, key: str | None, *, rdma_here: bool) -> list[Finding]:
    """Asks the gateway with this admin URL. key: one with the right admin, where it has keys."""
    headers = {} if key is None else {"x-api-key": key}
    trusted = ssl.create_default_context()  # of the system, or of SSL_CERT_FILE
    async with httpx2.AsyncClient(
        base_url=url, headers=headers, verify=trusted, trust_env=False, timeout=_TIMEOUT_S
    ) as client:
        try:
            return await _look(client, rdma_here=rdma_here)
        except (httpx2.HTTPError, httpx2.InvalidURL) as reason:
            why = str(reason) or type(reason).__name__
            return [error("reached", f"{url}: {why}", "name the admin port, as http://127.0.0.1:9001")]


async def _look(client: httpx2.AsyncClient, *, rdma_here: bool) -> list[Finding]:
    before = time.time()
    ready = await client.get("/ready")
    findings = [check_date(ready.headers.get("date"), (before, time.time()))]
    if ready.status_code == httpx2.codes.OK:
        findings.append(ok("ready", "takes requests"))
    else:
        findings.append(error("ready", f"takes no requests: {ready.text.strip()[:200]}", "look at its log"))
    ledger = await client.get("/debug/ledger")
    if ledger.status_code != httpx2.codes.OK:
        advice = "--api-key or BATON_API_KEY, with the right admin"
        findings.append(note("workers", f"/debug/ledger answers {ledger.status_code}", advice))
        return findings
    workers: list[Worker] = ledger.json()["workers"]
    metrics = await client.get("/metrics")
    return [*findings, *check_roles(workers), *check_pairs(pairs_of(metrics.text), workers, rdma_here=rdma_here)]


def check_date(header: str | None, here: tuple[float, float]) -> Finding:
    """Compares the clock of an answer's header with this machine's before and after the question."""
    if header is None:
        return note("clock", "the answer has no date")
    told = parsedate_to_datetime(header).timestamp()
    return check_clock((told, told + _DATE_SPAN_S), here)


def check_roles(workers: Sequence[Worker]) -> list[Finding]:
    """Tells which workers are connected, what computes their steps, and whether a role is missing."""
    findings = []
    for worker in workers:
        ways = f"{worker['role']}, kernels {worker['kernels']}, KV by {' or '.join(worker['transports'])}"
        state = ", draining" if worker["draining"] else ""
        findings.append(ok(str(worker["address"]), f"{ways}, protocol {worker['protocol']}{state}"))
    roles = {worker["role"] for worker in workers}
    if WorkerRole.DECODE.value not in roles:
        advice = "see the gateway's log, and the registry in Redis or --workers"
        findings.append(error("decode workers", "none is connected: nothing is generated", advice))
    if WorkerRole.PREFILL.value not in roles:
        findings.append(note("prefill workers", "none is connected: decode workers do it all"))
    return findings


def pairs_of(metrics: str) -> list[PairTransport]:
    """Reads the pairs out of Prometheus' text."""
    return [
        PairTransport(sample.labels["prefill"], sample.labels["decode"], sample.labels["transport"])
        for family in text_string_to_metric_families(metrics)
        if family.name == _PAIR_METRIC
        for sample in family.samples
        if sample.value == 1
    ]


def check_pairs(pairs: Sequence[PairTransport], workers: Sequence[Worker], *, rdma_here: bool) -> list[Finding]:
    """Tells which transport each pair really used. rdma_here: this machine has an active port for RDMA."""
    if not pairs:
        return [note("handoffs", "none yet: which transport a pair uses shows after its first")]
    known = {worker["address"]: worker["transports"] for worker in workers}
    return [_check_pair(pair, known, rdma_here=rdma_here) for pair in pairs]


def _check_pair(pair: PairTransport, known: Mapping[str, Sequence[str]], *, rdma_here: bool) -> Finding:
    name = f"{pair.prefill} to {pair.decode}"
    nixl = TransportName.NIXL.value
    both_could = all(nixl in known.get(address, ()) for address in (pair.prefill, pair.decode))
    if pair.transport == nixl or not both_could:
        return ok(name, f"KV moves over {pair.transport}")
    advice = "the decode worker's log line `reads from a worker` says why it reads no memory"
    found = f"KV moves over {pair.transport}, though both have nixl"
    if rdma_here:
        return warning(name, f"{found} and a port for RDMA is active here", advice)
    return note(name, found, advice)
