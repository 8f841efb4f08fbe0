"""A running gateway, asked at its admin port: its clock, its workers, and how KV moved between them."""

import json
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from kvtransfer.moved import Moved
from services.config import TransportName, WorkerRole
from services.config.hosts import is_loopback
from services.doctor.clock import check_clock, describe_lead
from services.doctor.finding import Finding, Level, error, note, ok, warning

_TIMEOUT_S = 2.0
_DATE_SPAN_S = 2.0  # a Date header has whole seconds, and a server may make it once a second
_PAIR_WAY, _PAIR_BYTES, _PAIR_TIME = "baton_pair_transport", "baton_pair_kv_bytes", "baton_pair_reading_seconds"

_FIELDS = {"address", "role", "kernels", "transports", "draining", "protocol"}

Worker = Mapping[str, Any]  # as /debug/ledger has it


@dataclass(frozen=True, slots=True)
class ReadsOfPair:
    """Reads between two workers: the way of the last handoff, and bytes and time of all."""

    prefill: str
    decode: str
    moved: Moved


class NotAnAdminPort(Exception):
    """Something answered that is no gateway's admin port. The message says why."""


async def check_gateway(url: str, key: str | None, *, rdma_here: bool) -> list[Finding]:
    """Asks the gateway with this admin URL. key: one with the right admin, where it has keys."""
    parts, findings = urlsplit(url), []
    if key is not None and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        findings.append(
            warning("key", "not sent: anyone on that network could read it", "name the gateway by https://")
        )
        key = None
    headers = {} if key is None else {"x-api-key": key}
    trusted = ssl.create_default_context()  # of the system, or of SSL_CERT_FILE
    async with httpx2.AsyncClient(
        base_url=url, headers=headers, verify=trusted, trust_env=False, timeout=_TIMEOUT_S
    ) as client:
        try:
            return [*findings, *await _look(client, rdma_here=rdma_here)]
        except (httpx2.HTTPError, NotAnAdminPort) as reason:
            why = str(reason) or type(reason).__name__
            return [*findings, error("reached", f"{url}: {why}", "name the admin port, as http://127.0.0.1:9001")]


async def _look(client: httpx2.AsyncClient, *, rdma_here: bool) -> list[Finding]:
    before = time.time()
    ready = await client.get("/ready")
    findings = [check_date(ready.headers.get("date"), (before, time.time()))]
    if ready.status_code == httpx2.codes.OK:
        findings.append(ok("ready", "takes requests"))
    else:
        findings.append(error("ready", f"takes no requests: {ready.text.strip()[:200]}", "look at its log"))
    ledger = await client.get("/debug/ledger")
    if ledger.status_code == httpx2.codes.NOT_FOUND:
        raise NotAnAdminPort("there is no /debug/ledger, as at a gateway's port for clients")
    if ledger.status_code != httpx2.codes.OK:
        advice = "--api-key or BATON_API_KEY, with the right admin"
        findings.append(note("workers", f"/debug/ledger answers {ledger.status_code}", advice))
        return findings
    told = read_ledger(ledger.text)
    workers: list[Worker] = told["workers"]
    metrics = await client.get("/metrics")
    return [
        *findings,
        *check_not_connected(told.get("not_connected", ())),
        *check_refused(told.get("refused", ())),
        *check_roles(workers),
        *check_fingerprints(workers),
        *check_clocks(workers, "the gateway's"),
        *check_pairs(pairs_of(metrics.text), workers, rdma_here=rdma_here),
    ]


def read_ledger(text: str) -> dict[str, Any]:
    """Reads what /debug/ledger answered. Raises NotAnAdminPort."""
    try:
        told = json.loads(text)
    except ValueError as reason:
        raise NotAnAdminPort(f"/debug/ledger is no JSON: {reason}") from reason
    workers = told.get("workers") if isinstance(told, dict) else None
    if not isinstance(workers, list) or not all(isinstance(each, dict) and each.keys() >= _FIELDS for each in workers):
        raise NotAnAdminPort("/debug/ledger has no workers as a gateway describes them")
    return dict(told)


def check_date(header: str | None, here: tuple[float, float]) -> Finding:
    """Compares the clock of an answer's header with this machine's before and after the question."""
    try:
        told = parsedate_to_datetime(header or "").timestamp()
    except ValueError:
        return note("clock", "the answer has no date")
    return check_clock((told, told + _DATE_SPAN_S), here)


def check_roles(workers: Sequence[Worker]) -> list[Finding]:
    """Tells which workers are connected, what computes their steps, and whether a role is missing."""
    findings = []
    for worker in workers:
        computes = f"{worker['role']}, kernels {worker['kernels']}{_weights(worker)}"
        ways = f"{computes}, KV by {' or '.join(worker['transports'])}"
        state = ", draining" if worker["draining"] else ""
        findings.append(ok(str(worker["address"]), f"{ways}, protocol {worker['protocol']}{state}"))
    roles = {worker["role"] for worker in workers}
    if WorkerRole.DECODE.value not in roles:
        advice = "see the gateway's log, and the registry in Redis or --workers"
        findings.append(error("decode workers", "none is connected: nothing is generated", advice))
    if WorkerRole.PREFILL.value not in roles:
        findings.append(note("prefill workers", "none is connected: decode workers do it all"))
    return findings


def _weights(worker: Worker) -> str:
    """Returns words on a worker's weights; none of an older one, which does not tell."""
    num_bytes, is_shared = worker.get("weight_bytes", 0), worker.get("shares_weights", False)
    shared = ", shared with workers of its host" if is_shared else ""
    return f", {num_bytes / 2**20:,.0f} MiB of weights{shared}" if num_bytes else ""


def check_not_connected(links: Sequence[Mapping[str, str]]) -> list[Finding]:
    """Tells which workers a gateway knows and has no stream to. links: addresses, and why not."""
    advice = "look at the worker, the network, and TLS on both sides (--mtls)"
    return [error(each["address"], f"the gateway is not connected: {each['why']}", advice) for each in links]


def check_fingerprints(workers: Sequence[Worker]) -> list[Finding]:
    """Compares what workers compute with: of different fingerprints none hands over to the other."""
    fingerprints = {str(worker["address"]): str(worker.get("fingerprint", "")) for worker in workers}
    if len(set(fingerprints.values())) < 2:
        return []
    found = ", ".join(f"{address} {fingerprint[:12]}" for address, fingerprint in sorted(fingerprints.items()))
    advice = "weights, dtype or block size differ: give all the same, and restart those that are behind"
    return [warning("fingerprints", f"these do not all hand over to each other: {found}", advice)]


def check_refused(workers: Sequence[Mapping[str, str]]) -> list[Finding]:
    """Tells which registered workers a gateway wants no stream to. workers: addresses, and why not."""
    advice = "fine where several models share a Redis; else give both the same model, and restart the gateway last"
    return [note(each["address"], f"the gateway refuses it: {each['why']}", advice) for each in workers]


def check_clocks(workers: Sequence[Worker], other: str) -> list[Finding]:
    """Compares the clocks of connected workers with the one that `other` names."""
    leads = {f"clock of {worker['address']}": worker.get("clock_lead_s") for worker in workers}
    judged = [describe_lead(name, lead_s, other) for name, lead_s in leads.items() if lead_s is not None]
    wrong = [finding for finding in judged if finding.level is not Level.OK]
    return wrong or ([ok("clocks of workers", f"agree with {other}")] if judged else [])


def pairs_of(metrics: str) -> list[ReadsOfPair]:
    """Reads the pairs out of Prometheus' text. Older gateways tell less of them. Raises NotAnAdminPort."""
    ways: dict[tuple[str, str], Mapping[str, str]] = {}
    sums: dict[tuple[str, str, str], float] = {}
    try:
        families = list(text_string_to_metric_families(metrics))
    except ValueError as reason:
        raise NotAnAdminPort(f"/metrics is not Prometheus' text: {reason}") from reason
    for family in families:
        if family.name not in (_PAIR_WAY, _PAIR_BYTES, _PAIR_TIME):
            continue
        for sample in family.samples:
            pair = sample.labels["prefill"], sample.labels["decode"]
            if family.name == _PAIR_WAY:
                ways[pair] = sample.labels
            else:
                sums[family.name, *pair] = sample.value
    pairs = []
    for pair, way in ways.items():
        num_bytes, reading_s = int(sums.get((_PAIR_BYTES, *pair), 0)), sums.get((_PAIR_TIME, *pair), 0.0)
        pairs.append(ReadsOfPair(*pair, Moved(way["transport"], way.get("why", ""), num_bytes, reading_s)))
    return pairs


def check_pairs(pairs: Sequence[ReadsOfPair], workers: Sequence[Worker], *, rdma_here: bool) -> list[Finding]:
    """Tells how KV really moved between each pair. rdma_here: this machine has an active port for RDMA."""
    if not pairs:
        return [note("handoffs", "none yet: which transport a pair uses shows after its first, or with --measure")]
    known = {worker["address"]: worker["transports"] for worker in workers}
    nixl = TransportName.NIXL.value
    findings = []
    for pair in pairs:
        both_could = all(nixl in known.get(address, ()) for address in (pair.prefill, pair.decode))
        name, found = f"{pair.prefill} to {pair.decode}", describe_reads(pair.moved)
        judged = judge_transport(name, found, pair.moved.transport, rdma_here=rdma_here and both_could)
        findings.append(replace(judged, figures={"bytes": pair.moved.num_bytes, "reading_s": pair.moved.reading_s}))
    return findings


def describe_reads(moved: Moved) -> str:
    """Puts reads into words: by which transport, why, and how fast."""
    way = f"KV moves over {moved.transport}" + (f" ({moved.why})" if moved.why else "")
    if not moved.reading_s:
        return way
    rate = moved.num_bytes / moved.reading_s
    return f"{way}, {moved.num_bytes / 1e6:,.1f} MB in {moved.reading_s * 1e3:,.1f} ms: {rate / 1e9:.2f} GB/s"


def judge_transport(name: str, found: str, transport: str, *, rdma_here: bool) -> Finding:
    """Judges the transport of a pair. rdma_here: this machine has a port for RDMA, which both workers could use."""
    if rdma_here and transport != TransportName.NIXL.value:
        advice = "a port for RDMA is active here: the words in brackets say what is missing"
        return warning(name, found, advice)
    return ok(name, found)
