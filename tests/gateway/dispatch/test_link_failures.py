"""Whatever one link meets is that link's alone: the others serve, the reason is logged once, and it is tried again."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import grpc
import pytest
from structlog.testing import capture_logs

from services.config import HandoffMode
from services.gateway.api.generation import GenerationError
from services.gateway.dispatch import links
from services.protocol.frames import Load
from services.protocol.messages import Abort
from tests.failures import FAILURES, NAMES, failing
from tests.gateway.dispatch_stack import DECODE, OTHER_DECODE, Stack, decode_worker, eventually, first, request, running
from tests.gateway.scripted_worker import ScriptedWorker, empty_frame

SEAMS = ("connect", "hello", "read", "send")


@dataclass
class Fault:
    """What fails on the way to one worker, over real channels and calls."""

    worker: ScriptedWorker
    seam: str
    failure: Exception
    count: int = 0
    channel: Any = field(default=grpc.aio.insecure_channel)

    def meet(self, seam: str) -> None:
        if seam == self.seam:
            self.count += 1
            raise self.failure

    def open(self, address: str, **options: Any) -> Any:
        """As grpc.aio.insecure_channel."""
        if address != f"dns:///{self.worker.address}":
            return self.channel(address, **options)
        self.meet("connect")
        channel = self.channel(address, **options)
        real = channel.stream_stream
        channel.stream_stream = lambda method: lambda: _Call(real(method)(), self)
        return channel


class _Call:
    """A call that meets a fault: with the first message of either side, or with a later one."""

    def __init__(self, call: Any, fault: Fault) -> None:
        self._call, self._fault = call, fault
        self._written = self._was_read = 0

    async def write(self, raw: bytes) -> None:
        self._fault.meet("send" if self._written else "hello")
        self._written += 1
        await self._call.write(raw)

    async def read(self) -> Any:
        if self._was_read:
            self._fault.meet("read")
        self._was_read += 1
        return await self._call.read()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


@contextmanager
def met(fault: Fault) -> Iterator[None]:
    with patch.object(grpc.aio, "insecure_channel", fault.open):
        yield


async def reaches_one_of(stack: Stack, victim: ScriptedWorker, other: ScriptedWorker) -> None:
    """A request comes to a worker: to the victim where its link stands just then, and the other's never broke.

    One that has met the victim's broken link too often has failed, as if it ended workers; its client asks again.
    """
    while not (victim.submits or other.submits):
        async with stack.dispatcher.generate(request()) as generation:
            reading = asyncio.create_task(first(generation))  # who reads has what failed placed again
            await eventually(lambda: bool(victim.submits or other.submits) or reading.done())  # noqa: B023
            reading.cancel()
            (ended,) = await asyncio.gather(reading, return_exceptions=True)
            assert isinstance(ended, asyncio.CancelledError | GenerationError), ended
    assert len(other.hellos) == 1, "the other's link was broken too"


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
@pytest.mark.parametrize("seam", SEAMS)
async def test_a_link_that_fails_is_logged_once_and_tried_again(
    seam: str, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "FIRST_BACKOFF_S", 0.005)
    monkeypatch.setattr(links, "LONGEST_BACKOFF_S", 0.01)
    victim, other = decode_worker(), decode_worker(OTHER_DECODE)
    async with running(victim, other, handoff=HandoffMode.NEVER) as stack:
        with capture_logs() as logs, met(fault := Fault(victim, seam, failure)):
            victim.break_stream()
            link = stack.dispatcher._links[victim.address]
            number = 0
            async with asyncio.timeout(60):
                while fault.count < 4:
                    await eventually(lambda: link.connected or fault.count >= 4)
                    link.send(Abort(number := number + 1))
                    await asyncio.sleep(0.002)
            await reaches_one_of(stack, victim, other)
        await stack.connected(2)
        told = [line["reason"] for line in logs if line["event"] == "worker not connected"]
        assert [type(failure).__name__ in reason for reason in told].count(True) == 1, told
        async with asyncio.timeout(60):
            while number + 1 not in victim.aborts:  # the last call that meets the fault may end only now
                await eventually(lambda: link.connected)
                link.send(Abort(number + 1))
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
async def test_a_defect_in_handling_one_workers_messages_is_its_links_alone(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "FIRST_BACKOFF_S", 0.005)
    monkeypatch.setattr(links, "LONGEST_BACKOFF_S", 0.01)
    victim, other = decode_worker(), decode_worker(OTHER_DECODE)
    async with running(victim, other, handoff=HandoffMode.NEVER) as stack:
        of_victim = lambda _, worker, *__: worker == victim.hello.worker_id
        with (
            capture_logs() as logs,
            failing("services.gateway.dispatch.dispatcher.Dispatcher._note_load", failure, of_victim) as failed,
        ):
            while len(failed) < 3:
                victim.say(empty_frame(load=Load()))
                await asyncio.sleep(0.005)
            await reaches_one_of(stack, victim, other)
        await stack.connected(2)
        told = [line for line in logs if type(failure).__name__ in line.get("reason", "")]
        assert [line["exc_info"] for line in told] == [failure]


# Of a worker's coming and going, each with what of its arguments names the worker.
STEPS: dict[str, Callable[..., int]] = {
    "services.gateway.dispatch.fleet.Fleet.cut_off_from": lambda live: live.id,
    "services.gateway.dispatch.ledger.ledger.Ledger.on_return": lambda worker: worker,
    "tests.gateway.dispatch_stack.Counts.worker_up": lambda _, hello: hello.worker_id,
    "services.gateway.dispatch.fleet.Fleet.max_model_len": lambda: DECODE,
    "services.gateway.dispatch.ledger.ledger.Ledger.on_lost": lambda worker: worker,
    "tests.gateway.dispatch_stack.Counts.worker_gone": lambda *_: DECODE,
}


@pytest.mark.few(2)
@pytest.mark.parametrize("step", STEPS)
async def test_a_worker_whose_coming_or_going_fails_halfway_is_not_locked_out(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "FIRST_BACKOFF_S", 0.005)
    monkeypatch.setattr(links, "LONGEST_BACKOFF_S", 0.01)
    victim = decode_worker()
    async with running(victim, handoff=HandoffMode.NEVER) as stack:
        link = stack.dispatcher._links[victim.address]
        for _ in range(2):
            await eventually(lambda: link.connected)
            with failing(step, FAILURES[0], lambda _, *of: STEPS[step](*of) == DECODE) as failed:
                victim.break_stream()
                await eventually(lambda: len(failed) > 0)
        await eventually(lambda: link.connected)
        async with stack.dispatcher.generate(request()):
            await victim.submit()


async def test_a_worker_that_is_refused_at_a_second_address_stays_at_the_first():
    victim = decode_worker()
    async with running(victim, handoff=HandoffMode.NEVER) as stack:
        other = victim.address.replace("127.0.0.1", "localhost")
        stack.dispatcher.set_addresses([victim.address, other])
        await eventually(lambda: stack.dispatcher.refused().keys() == {other})
        async with stack.dispatcher.generate(request()):
            await victim.submit()
