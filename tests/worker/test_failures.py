"""What fails on a worker's streams is that stream's or that read's alone; outputs that are lost end the worker."""

import asyncio

import pytest
from structlog.testing import capture_logs

from kvtransfer.transports.byte_stream import ByteStreamTransport
from kvtransfer.transports.memory import MemoryFabric
from services.config import WorkerRole
from services.protocol.outcomes import FailureCode
from services.tls.roles import CertificateRole
from services.worker import kv_streams
from tests.engine.harness import reference
from tests.failures import FAILURES, NAMES, failing, first
from tests.worker.client import TestGateway
from tests.worker.conftest import Pair, make_worker, serving, worker_baseline

PROMPT = list(range(30, 60))


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
async def test_a_control_stream_that_cannot_be_opened_is_opened_a_moment_later(
    pair: Pair, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_streams, "_RETRY_S", 0.01)
    twice = first(2)
    to_producer = lambda _, address, role, *__: role is CertificateRole.PREFILL and twice()
    with capture_logs(), failing("services.tls.grpc_ends.Channels.open", failure, to_producer) as failed:
        handle = await pair.gateway.hand_off(pair.prefill, pair.decode, PROMPT, 5)
        await pair.decode.until(lambda: pair.decode.ended(handle))
    assert len(failed) == 2
    assert pair.decode.tokens(handle) == reference(PROMPT, 5)
    await pair.baseline()


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
async def test_a_message_that_cannot_be_sent_breaks_its_stream_and_not_the_next_one(
    pair: Pair, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_streams, "_RETRY_S", 0.01)
    with capture_logs(), failing("services.worker.kv_streams.pack_to_producer", failure, first(1)) as failed:
        handle = await pair.gateway.hand_off(pair.prefill, pair.decode, PROMPT, 5)
        await pair.decode.until(lambda: pair.decode.ended(handle))
    assert len(failed) == 1
    if handle not in pair.decode.failures:  # it was opened again in time
        assert pair.decode.tokens(handle) == reference(PROMPT, 5)
    second = await pair.gateway.hand_off(pair.prefill, pair.decode, PROMPT[::-1], 5)
    await pair.decode.until(lambda: pair.decode.ended(second))
    assert pair.decode.tokens(second) == reference(PROMPT[::-1], 5)


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
async def test_a_read_that_cannot_begin_fails_at_once_and_the_next_one_works(failure: Exception) -> None:
    fabric, gateway = MemoryFabric(), TestGateway()
    over_grpc = lambda source, dial: [ByteStreamTransport(source, dial)]
    workers = [make_worker(role, fabric, transports=over_grpc) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)]
    async with (
        serving(*workers) as (prefill_port, decode_port),
        gateway.connect(prefill_port) as prefill,
        gateway.connect(decode_port) as decode,
    ):
        stub = "services.worker.kv_bytes.kv_pb2_grpc.KvBytesStub"
        with capture_logs(), failing(stub, failure, first(1)) as failed:
            handle = await gateway.hand_off(prefill, decode, PROMPT, 5)
            await decode.until(lambda: decode.ended(handle))
        assert len(failed) == 1
        assert decode.failures[handle].code is FailureCode.HANDOFF
        second = await gateway.hand_off(prefill, decode, PROMPT[::-1], 5)
        await decode.until(lambda: decode.ended(second))
        assert decode.tokens(second) == reference(PROMPT[::-1], 5)
        await worker_baseline(workers[1])


async def test_a_worker_whose_outputs_cannot_be_delivered_ends_rather_than_lose_tokens() -> None:
    worker, gateway = make_worker(WorkerRole.DECODE, MemoryFabric()), TestGateway()
    async with serving(worker) as (port,), gateway.connect(port) as decode:
        with capture_logs() as logs, failing("services.worker.gateway_servicer.frame_for", RuntimeError("a defect")):
            await decode.send(gateway.submit(PROMPT, 5))
            reason = await asyncio.wait_for(asyncio.shield(worker.ended), 60)
        assert reason == "what the engine said cannot be delivered"
        assert [line["event"] for line in logs if line["log_level"] == "error"] == [reason]
