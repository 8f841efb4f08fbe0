"""The transports of a process that has a part of a worker's memory, driven by the worker's own process.

One thread uses the transports, as everywhere; another one receives. The worker's own process says how often to poll: it
knows when blocks are read, by it or by others.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from kvtransfer.ids import WorkerId
from kvtransfer.process import ProcessIdentity
from kvtransfer.transports.base import Transport, TransportError
from kvtransfer.transports.part_messages import (
    Ask,
    ChannelLostError,
    MessageChannel,
    PartHello,
    PartMessage,
    Tell,
    pack_end,
    pack_reach,
    unpack_pace,
    unpack_read,
    unpack_worker,
)
from kvtransfer.transports.parts import PartOffer

_FIRST_PACE_S = 0.02


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message to a process with a part."""

    worker: WorkerId
    transport: str  # as the worker is configured


def wait_for_begin(channel: MessageChannel) -> Begin | None:
    """Waits for the first message; None: the channel is closed before it. Raises TransportError for another one."""
    try:
        message = PartMessage.unpack(channel.receive())
    except ChannelLostError:
        return None
    except ValueError as error:
        raise TransportError(f"the first message is {error}") from error
    if message.kind != Ask.BEGIN:
        raise TransportError(f"the first message is of kind {message.kind}")
    return Begin(WorkerId(message.worker), message.body.decode())


class PartServer:
    """Serves on the thread that calls `run`."""

    def __init__(self, channel: MessageChannel, transports: Mapping[str, tuple[Transport, str]]) -> None:
        """transports: by name, each with the host:port at which this process serves it, which may be empty."""
        self._channel = channel
        self._transports = dict(enumerate(transport for transport, _ in transports.values()))  # that are not closed
        self._offers = {
            name: PartOffer(address, transport.descriptor()) for name, (transport, address) in transports.items()
        }
        self._inbox: SimpleQueue[PartMessage | Exception | None] = SimpleQueue()  # ends with why, or None: it is lost
        self._pace_s = _FIRST_PACE_S

    def run(self) -> None:
        """Serves until the channel is lost or closed.

        Raises TransportError where a transport fails, or what comes is no message.
        """
        hello = PartHello(self._offers, ProcessIdentity.own())
        receiver = threading.Thread(target=self._receive, name="part", daemon=True)
        try:
            self._channel.send(PartMessage(Tell.HELLO, body=hello.pack()).pack())
            receiver.start()
            while self._take_messages():
                for number, transport in self._transports.items():
                    for end in transport.poll():
                        has_words = end.generations is not None
                        told = PartMessage(Tell.END, number, end.read_id, flag=has_words, body=pack_end(end))
                        self._channel.send(told.pack())
        except ChannelLostError:
            return

    def _receive(self) -> None:
        try:
            while True:
                self._inbox.put(PartMessage.unpack(self._channel.receive()))
        except ChannelLostError:
            self._inbox.put(None)
        except Exception as error:  # raised by the thread that serves
            self._inbox.put(error)

    def _take_messages(self) -> bool:
        """Does what has come, after a wait of the pace. Returns False when nothing comes any more."""
        try:
            message = self._inbox.get(timeout=self._pace_s)
            while message is not None:
                if isinstance(message, Exception):
                    raise TransportError(f"what the worker's own process sent cannot be read: {message}") from message
                self._do(message)
                message = self._inbox.get_nowait()
        except Empty:
            return True
        return False

    def _do(self, message: PartMessage) -> None:
        transport, worker = self._transports[message.transport], WorkerId(message.worker)
        match Ask(message.kind):
            case Ask.REMOVE:
                transport.remove_worker(worker)
            case Ask.POST:
                transport.post(unpack_read(message))
            case Ask.ABANDON:
                transport.abandon(message.number)
            case Ask.PACE:
                self._pace_s = unpack_pace(message.body)
            case _:
                self._answer(message, transport)

    def _answer(self, message: PartMessage, transport: Transport) -> None:
        body, done = b"", True
        try:
            match Ask(message.kind):
                case Ask.REACH:
                    body = pack_reach(transport.reach(message.body))
                case Ask.ADD:
                    transport.add_worker(WorkerId(message.worker), *unpack_worker(message.body))
                case Ask.CLOSE:
                    transport.close()
                    del self._transports[message.transport]
        except TransportError as error:
            body, done = str(error).encode(), False
        self._channel.send(PartMessage(Tell.ANSWER, message.transport, message.number, flag=done, body=body).pack())
