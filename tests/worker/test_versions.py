"""What a worker sends to gateways of other minor versions."""

import numpy as np
import pytest

from kvtransfer.transports.memory import MemoryFabric
from services.config import WorkerRole
from services.protocol.frames import Failure
from services.protocol.messages import GatewayHello
from services.protocol.outcomes import FailureCode
from services.protocol.versions import PROTOCOL_MINOR, Since, frame_for
from tests.gateway.scripted_worker import empty_frame
from tests.worker.client import TestGateway
from tests.worker.conftest import make_worker, serving
from tests.worker.test_worker import LONG


@pytest.mark.parametrize(
    ("minor", "code"),
    [
        (Since.DRAINING - 1, FailureCode.NOT_NOW),
        (Since.DRAINING, FailureCode.DRAINING),
        (PROTOCOL_MINOR + 1, FailureCode.DRAINING),
    ],
)
async def test_a_drain_is_told_to_a_gateway_in_a_code_that_its_version_knows(minor: int, code: FailureCode):
    worker, gateway = make_worker(WorkerRole.DECODE, MemoryFabric()), TestGateway(minor=minor)
    async with serving(worker) as (port,), gateway.connect(port) as stream:
        submit = gateway.submit([1, 2, 3], LONG)
        await stream.send(submit)
        await stream.until(lambda: stream.rows[submit.handle])
        worker.drain(0.5)
        await stream.until(lambda: stream.ended(submit.handle), 10)
        assert stream.failures[submit.handle].code is code
        assert stream.load.draining


def test_a_frame_for_an_older_gateway_keeps_all_but_what_is_too_new():
    frame = empty_frame()
    frame.failures = [Failure(1, FailureCode.DRAINING, "why"), Failure(2, FailureCode.TOO_LARGE)]
    older = frame_for(Since.DRAINING - 1, frame)
    assert older.failures == [Failure(1, FailureCode.NOT_NOW, "why"), Failure(2, FailureCode.TOO_LARGE)]
    assert older.load is frame.load
    assert np.array_equal(older.tokens, frame.tokens)
    assert frame_for(PROTOCOL_MINOR, frame) is frame


def test_a_hello_says_today_s_version():
    assert GatewayHello(TestGateway().id, 0).protocol_minor == PROTOCOL_MINOR == max(Since)
