"""Handoffs between workers, measured: for some requests this process is their gateway."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import cast

import numpy as np
from prometheus_client import CollectorRegistry

from kvtransfer.moved import Moved
from services.config import HandoffMode, WorkerRole
from services.doctor.finding import Finding, error, note
from services.doctor.gateway import Worker, check_clocks, check_roles, describe_reads, judge_transport
from services.gateway.api.generation import GenerationError, GenerationRequest
from services.gateway.api.records.attempt_record import AttemptRecord
from services.gateway.dispatch.dispatcher import Dispatcher, WorkerAccess
from services.gateway.dispatch.router import Policy
from services.gateway.metrics import GatewayMetrics
from services.prefix_index.memory import MemoryPrefixIndex
from services.protocol.capsule import Capsule
from services.protocol.sampling import SamplingParams
from services.tls.certificate import TlsError
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.grpc_ends import Channels

NUM_HANDOFFS = 5  # that count, of each length, after one that does not
LENGTHS = (64, 1024)  # tokens of a prompt
_NUM_TOKENS = 4  # of an answer
_CONNECT_S = 3.0
_REQUEST_S = 20.0
_MEASURE_S = 100.0  # for all pairs
LIMIT_S = _MEASURE_S + 20


@dataclass(frozen=True, slots=True)
class Handoff:
    """One handoff as a gateway saw it."""

    moved: Moved
    after_s: float  # from the first token, of the prefill worker, to the next one, of the decode worker


class HandoffFailed(Exception):
    """A request was served, and not by a handoff at the first attempt. The message says why."""


async def measure_handoffs(addresses: Sequence[str], mtls: Path | None, *, rdma_here: bool) -> list[Finding]:
    """Connects to the workers as a gateway does, and has each pair of them hand over some prompts.

    mtls: directory with a gateway's certificate; None: in plain text. rdma_here: this machine has an active port for
    RDMA.
    """
    try:
        channels = Channels(None if mtls is None else CertificateFiles(CertificatePaths.in_directory(mtls)))
    except TlsError as reason:
        return [error("handoffs", f"not measured: {reason}", "see the findings on certificates")]
    async with _gateway_of(addresses, channels) as gateway:
        await _until(lambda: not gateway.describe()["not_connected"])
        told = gateway.describe()
    workers = cast(list[Worker], told["workers"])
    findings = [_not_connected(each) for each in cast(list[dict[str, str]], told["not_connected"])]
    findings += [*check_roles(workers), *check_clocks(workers, "this machine's")]
    prefill, decode = (_of_role(workers, role) for role in (WorkerRole.PREFILL, WorkerRole.DECODE))
    until = asyncio.get_running_loop().time() + _MEASURE_S
    for pair in [(first, second) for first in prefill for second in decode]:
        try:
            async with asyncio.timeout_at(until):
                findings += await _measure_pair(*pair, channels, rdma_here=rdma_here)
        except TimeoutError:
            name = " to ".join(str(worker["address"]) for worker in pair)
            findings.append(note(name, f"not measured: {_MEASURE_S:g} s are over", "name fewer workers"))
    return findings


@contextlib.asynccontextmanager
async def _gateway_of(addresses: Sequence[str], channels: Channels) -> AsyncIterator[Dispatcher]:
    """Runs the part of a gateway that dispatches, over these workers alone; every request is handed off."""
    access = WorkerAccess(no_worker_wait_s=_CONNECT_S, channels=channels)
    metrics = GatewayMetrics(CollectorRegistry())
    dispatcher = Dispatcher(addresses, Policy(HandoffMode.ALWAYS), 1, MemoryPrefixIndex(), metrics, access)
    running = asyncio.create_task(dispatcher.run())
    try:
        yield dispatcher
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _until(condition: Callable[[], bool]) -> bool:
    """Waits for a condition, not for ever; returns whether it came."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CONNECT_S):
            while not condition():
                await asyncio.sleep(0.01)
    return condition()


def _not_connected(told: dict[str, str]) -> Finding:
    advice = "with --mtls only a certificate of the role gateway may do this; else see the findings on workers"
    return error(told["address"], f"not connected as a gateway: {told['why']}", advice)


def _of_role(workers: Sequence[Worker], role: WorkerRole) -> list[Worker]:
    return [worker for worker in workers if worker["role"] == role.value and not worker["draining"]]


async def _measure_pair(prefill: Worker, decode: Worker, channels: Channels, *, rdma_here: bool) -> list[Finding]:
    addresses = [str(worker["address"]) for worker in (prefill, decode)]
    name = " to ".join(addresses)
    lengths = sorted({min(length, _longest(prefill, decode)) for length in LENGTHS})
    async with _gateway_of(addresses, channels) as gateway:
        if not await _until(lambda: not gateway.describe()["not_connected"]):
            return [note(name, "not measured: one of them is not there any more")]
        findings: list[Finding] = []
        for length in lengths:
            try:
                measured = [await _hand_off(gateway, length, prefill["vocab_size"]) for _ in range(NUM_HANDOFFS + 1)]
            except (GenerationError, HandoffFailed) as reason:
                advice = "the decode worker's log has more; docs/run/troubleshooting.md helps"
                return [*findings, error(name, f"a handoff of {length} tokens failed: {reason}", advice)]
            findings.append(describe(name, length, measured[1:], rdma_here=rdma_here))
    return findings


def _longest(prefill: Worker, decode: Worker) -> int:
    """The most tokens of a prompt that leaves room for others at both workers."""
    both = (prefill, decode)
    context = min(each["max_model_len"] - _NUM_TOKENS for each in both)
    return int(min(context, *(each["num_blocks"] * each["block_size"] // 2 for each in both)))


async def _hand_off(gateway: Dispatcher, length: int, vocab_size: int) -> Handoff:
    """Asks for a handoff of a prompt of random tokens. Raises GenerationError or HandoffFailed."""
    tokens = np.random.default_rng().integers(vocab_size, size=length, dtype=np.int32)
    sampling = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
    request = GenerationRequest(f"doctor-{secrets.token_hex(8)}", (Capsule(tokens, length, sampling),), _REQUEST_S)
    async with gateway.generate(request) as running:
        while not (await running.next()).finish:
            pass
    return _handoff_of(next(iter(request.attempts)))


def _handoff_of(attempt: AttemptRecord) -> Handoff:
    there = attempt.at.get(WorkerRole.DECODE)
    if attempt.failure or there is None or attempt.first_token is None or attempt.second_worker is None:
        raise HandoffFailed(attempt.failure or "the answer ended before the decode worker had it")
    return Handoff(there.moved, attempt.second_worker - attempt.first_token)


def describe(name: str, length: int, handoffs: Sequence[Handoff], *, rdma_here: bool) -> Finding:
    """Puts handoffs of one pair and one length of prompt into words. There is at least one."""
    last = handoffs[-1].moved
    reading_s = median(handoff.moved.reading_s for handoff in handoffs)
    after_ms = median(handoff.after_s for handoff in handoffs) * 1e3
    reads = describe_reads(replace(last, reading_s=reading_s))
    found = f"{reads}; the decode worker's first token comes {after_ms:.1f} ms after the prefill worker's"
    finding = judge_transport(f"{name}, {length:,} tokens", found, last.transport, rdma_here=rdma_here)
    figures = {"tokens": length, "bytes": last.num_bytes, "reading_ms": reading_s * 1e3, "after_ms": after_ms}
    return replace(finding, figures=figures)
