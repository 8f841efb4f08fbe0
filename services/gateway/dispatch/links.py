"""Streams to workers: one for each address, kept up for as long as the gateway runs.

On a stream there is a hello, then commands go down and frames up until something breaks; then the link begins another
one. All attempts on a worker end with its stream. The reading task hands a worker's messages on without waiting;
commands wait in one bounded queue, in the order in which they were given. A worker counts as lost when its stream ends,
or when it answers no ping, is silent for too long, or does not read.
"""

import asyncio
import time
from typing import NoReturn, Protocol

import grpc
import structlog

from kvtransfer.ids import WorkerId
from services.config.hosts import AddressError
from services.gateway.dispatch.lost_links import ENDED
from services.process.backoff import Backoff
from services.protocol.clock import certain_lead_s
from services.protocol.frames import Frame
from services.protocol.grpc_options import CLIENT_OPTIONS
from services.protocol.messages import (
    BlockEvents,
    Command,
    Commands,
    GatewayHello,
    WorkerHello,
    WorkerMessage,
    WorkerNews,
)
from services.protocol.versions import PROTOCOL_MAJOR, Since
from services.protocol.wire import WireError, deserialize_worker_message, serialize_gateway_message
from services.tls.grpc_ends import Channels, check_name
from services.tls.roles import CertificateRole

CONNECT = "/baton.v1.Worker/Connect"

HELLO_TIMEOUT_S = 5.0
# A worker sends a message about once a second, and after every step. A worker that answers pings but is silent for
# longer than any step takes, that of a large model on a small machine included, hangs.
SILENCE_TIMEOUT_S = 120.0
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 2.0
MAX_QUEUED_COMMANDS = 16_384
_ENOUGH_BYTES = 256 << 10  # of commands in one message; further commands wait for the next

log = structlog.get_logger()


class LinkLost(Exception):
    """Says why a stream ended, or did not begin.

    LinkLost
    └── LinkRefused   the two sides do not speak the same protocol
    """


class LinkRefused(LinkLost):
    """The worker does not fit; another try helps only after one side was replaced."""


def of_another_model(theirs: str, ours: str) -> str:
    """Says why a worker is refused. theirs, ours: digests of the models of the worker and of the gateway."""
    return f"it serves model {theirs[:12]}, this gateway {ours[:12]}: their configuration or tokenizer differs"


class LinkListener(Protocol):
    """Is told what happens on the links. No method may wait."""

    def gateway_hello(self) -> GatewayHello:
        """The gateway's id, and the highest handle that it has allocated by now."""

    def worker_up(self, link: "WorkerLink", hello: WorkerHello) -> None:
        """A stream began. Raises LinkRefused for a worker that does not fit."""

    def worker_sent(self, worker: WorkerId, message: Frame | BlockEvents | WorkerNews) -> None:
        """A worker sent a frame, block events or news. The messages come in order, and none is missing."""

    def worker_down(self, link: "WorkerLink", worker: WorkerId) -> None:
        """The stream ended, or `worker_up` raised for it. Nothing is down where the worker is up on another link."""

    def link_ended(self, link: "WorkerLink") -> None:
        """A stream ended, after `worker_down`, or none began. The link's `why_not` says why."""


class WorkerLink:
    """The streams to the workers that live at `address`, one after the other."""

    def __init__(self, address: str, listener: LinkListener, channels: Channels) -> None:
        self.address = address
        self._channels = channels
        self.tried = False  # a first stream began, or could not
        self.why_not = "not tried so far"  # the reason why the last stream ended, or none began
        self.refused = False  # the last stream ended since the worker does not fit
        self.since = time.time()  # there is a stream, or none; or the worker is refused
        self.clock_lead_s: float | None = None  # of the last worker that told its time, see `certain_lead_s`
        self._listener = listener
        self._stream: _Stream | None = None

    @property
    def connected(self) -> bool:
        """True while there is a stream."""
        return self._stream is not None

    def send(self, command: Command) -> None:
        """Queues a command. It is not sent when there is no stream, or when the stream ends first."""
        if self._stream is not None:
            self._stream.queue(command)

    def reset(self, why: str) -> None:
        """Ends the stream, if there is one; the next one begins at once."""
        if self._stream is not None:
            self._stream.fail(why)

    async def run(self) -> NoReturn:
        """Connects again and again, until cancelled."""
        backoff = Backoff(FIRST_BACKOFF_S, LONGEST_BACKOFF_S)
        logged: str | None = None  # the last reason that was logged, so that each is logged once
        while True:
            try:
                await self._run_stream()
            except Exception as error:  # LinkLost, and whatever else: it is this link's alone
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise asyncio.CancelledError from error  # a call that just ended answers a cancellation by its end
                self.tried = True
                foreseen = isinstance(error, LinkLost)
                self.why_not = str(error) if foreseen else f"{type(error).__name__}: {error}"
                was_refused, self.refused = self.refused, isinstance(error, LinkRefused)
                greeted, self._stream = self._stream is not None, None
                if greeted or was_refused is not self.refused:
                    self.since = time.time()
                self._listener.link_ended(self)
                if greeted and foreseen:  # else a defect that every stream meets would be met without a pause
                    backoff.reset()
                    logged = None
                if self.why_not != logged:
                    trace = None if foreseen else error
                    log.warning("worker not connected", address=self.address, reason=self.why_not, exc_info=trace)
                    logged = self.why_not
            await asyncio.sleep(backoff.next_s())

    async def _run_stream(self) -> None:
        try:
            await check_name(self.address)
        except AddressError as error:
            raise LinkLost(str(error)) from error
        async with self._channels.open(self.address, CertificateRole.WORKER, CLIENT_OPTIONS) as channel:
            stream = _Stream(channel.stream_stream(CONNECT)(), self._listener)
            asked_at = time.time()
            hello = await stream.greet()
            self.clock_lead_s = _clock_lead_s(hello, asked_at, time.time())
            try:
                self._listener.worker_up(self, hello)
                self._stream = stream
                self.tried, self.refused, self.since = True, False, time.time()
                worker = f"{stream.worker:016x}"
                log.info("worker connected", address=self.address, role=hello.role.value, worker=worker)
                await stream.run()
            finally:  # also where half of `worker_up` was done
                self._listener.worker_down(self, stream.worker)


class _Stream:
    """One stream, from its hello to its end."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]", listener: LinkListener) -> None:
        self._call = call
        self._listener = listener
        self._commands: asyncio.Queue[Command] = asyncio.Queue(MAX_QUEUED_COMMANDS)
        self._failed = asyncio.Event()
        self._failure = ""
        self._heard_at = 0.0
        self._sequence: int | None = None  # of the last block events
        self._together = False  # the worker takes several commands in one message
        self.worker = WorkerId(0)

    async def greet(self) -> WorkerHello:
        """Exchanges hellos. Raises LinkLost or LinkRefused."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await self._write(serialize_gateway_message(self._listener.gateway_hello()))
                hello = await self._read()
        except TimeoutError:
            raise LinkLost(f"no hello within {HELLO_TIMEOUT_S:g} s") from None
        if not isinstance(hello, WorkerHello):
            raise LinkLost("its first message is not a hello")
        if hello.protocol_major != PROTOCOL_MAJOR:
            theirs = f"{hello.protocol_major}.{hello.protocol_minor}"
            raise LinkRefused(f"it speaks protocol {theirs}, this gateway {PROTOCOL_MAJOR}")
        self.worker = hello.worker_id
        self._together = hello.protocol_minor >= Since.COMMANDS
        return hello

    async def run(self) -> None:
        """Carries messages both ways. Always ends in LinkLost."""
        # No task group: up to Python 3.12 one in which a task fails just as it is cancelled loses the cancellation.
        tasks = [asyncio.create_task(part) for part in (self._send_commands(), self._receive(), self._watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    def queue(self, command: Command) -> None:
        """Puts a command behind the others. Ends the stream of a worker that leaves too many unread."""
        try:
            self._commands.put_nowait(command)
        except asyncio.QueueFull:
            self.fail(f"it left {MAX_QUEUED_COMMANDS} commands unread")

    def fail(self, why: str) -> None:
        """Ends the stream soon."""
        self._failure = self._failure or why
        self._failed.set()

    async def _send_commands(self) -> None:
        while True:
            message = bytearray(self._packed(await self._commands.get()))
            while self._together and len(message) < _ENOUGH_BYTES and not self._commands.empty():
                message += self._packed(self._commands.get_nowait())
            await self._write(bytes(message))

    def _packed(self, command: Command) -> bytes:
        return serialize_gateway_message(Commands((command,)) if self._together else command)

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            message = await self._read()
            self._heard_at = loop.time()
            if isinstance(message, WorkerHello):
                raise LinkLost("it said hello twice")
            if isinstance(message, BlockEvents):
                self._check_sequence(message)
            self._listener.worker_sent(self.worker, message)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()
        while not self._failed.is_set():
            try:
                async with asyncio.timeout_at(self._heard_at + SILENCE_TIMEOUT_S):
                    await self._failed.wait()
            except TimeoutError:
                if loop.time() >= self._heard_at + SILENCE_TIMEOUT_S:
                    self.fail(f"it was silent for {SILENCE_TIMEOUT_S:g} s")
        raise LinkLost(self._failure)

    def _check_sequence(self, events: BlockEvents) -> None:
        expected = None if self._sequence is None else self._sequence + 1
        if not events.snapshot and events.sequence != expected:
            raise LinkLost(f"block events {events.sequence} came where {expected} was due")
        self._sequence = events.sequence

    async def _read(self) -> WorkerMessage:
        try:
            raw = await self._call.read()
            if isinstance(raw, bytes):
                return deserialize_worker_message(raw)
            raise LinkLost(await self._describe_end())
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from error
        except WireError as error:
            raise LinkLost(f"it sent a message that makes no sense: {error}") from error

    async def _write(self, raw: bytes) -> None:
        try:
            await self._call.write(raw)
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from error
        except asyncio.InvalidStateError:
            raise LinkLost(await self._describe_end()) from None

    async def _describe_end(self) -> str:
        return f"{ENDED}{(await self._call.code()).name}: {await self._call.details() or 'no words'})"


def _clock_lead_s(hello: WorkerHello, asked_at: float, now: float) -> float | None:
    told = hello.time_us / 1e6
    return certain_lead_s((told, told), (asked_at, now)) if told else None


def _translated(error: grpc.aio.AioRpcError) -> LinkLost:
    kind = LinkRefused if error.code() is grpc.StatusCode.FAILED_PRECONDITION else LinkLost
    return kind(f"{error.code().name}: {error.details()}")
