"""Transports of another process of the same worker, which has another part of its memory: this process drives them.

    the worker's own process                      a process with another part, often on another host
    RemoteTransport ─┐                                     ┌─ a transport
    RemoteTransport ─┴ PartLink ═══ MessageChannel ═══ PartServer ─┴─ a transport

A part whose process is lost ends the worker: nobody knows what of the open reads still lands there.
"""

import threading
from concurrent.futures import Future
from itertools import count
from queue import Empty, SimpleQueue
from typing import TypeVar

from kvtransfer.ids import WorkerId
from kvtransfer.transports.base import BlockRead, Reach, ReadEnd, TransportError
from kvtransfer.transports.part_messages import (
    Ask,
    ChannelLostError,
    MessageChannel,
    PartHello,
    PartMessage,
    Tell,
    pack_pace,
    pack_read,
    pack_worker,
    unpack_end,
    unpack_reach,
)
from kvtransfer.transports.parts import PartOffer

_Told = TypeVar("_Told")
_ANSWER_S = 10.0  # for a question, which takes milliseconds


class PartLink:
    """This end of the channel to a process with another part."""

    def __init__(self, part: int, channel: MessageChannel, answer_s: float = _ANSWER_S) -> None:
        """Starts a thread that receives, until the channel is lost or closed."""
        self.part = part
        self._channel = channel
        self._answer_s = answer_s
        self._hello: Future[PartHello] = Future()
        self._questions: dict[int, Future[PartMessage]] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()  # of the following, and of questions
        self._lost: str | None = None
        self._ends: dict[int, SimpleQueue[ReadEnd]] = {}
        threading.Thread(target=self._receive, name=f"part {part}", daemon=True).start()

    def begin(self, worker: WorkerId, transport: str) -> None:
        """Tells the process to make its transports, and to say hello. transport: as the worker is configured.

        Raises TransportError where the process is lost.
        """
        self.tell(PartMessage(Ask.BEGIN, worker=worker, body=transport.encode()))

    def hello(self, timeout_s: float) -> PartHello:
        """Waits for the hello. Raises TransportError."""
        return self._wait(self._hello, timeout_s)

    def transport(self, name: str) -> "RemoteTransport":
        """Returns the transport of this name, which the hello offers."""
        offers = self.hello(self._answer_s).offers
        number = list(offers).index(name)
        ends = self._ends[number] = SimpleQueue()
        return RemoteTransport(self, name, number, offers[name], ends)

    def tell(self, message: PartMessage) -> None:
        """Sends what is not answered. Raises TransportError where the process is lost."""
        try:
            self._channel.send(message.pack())
        except ChannelLostError as error:
            raise self._lost_error(str(error)) from error

    def ask(self, kind: Ask, transport: int, worker: int = 0, body: bytes = b"") -> bytes:
        """Sends a question, and returns the answer. Raises TransportError where that is why not, or none comes."""
        number, answer = next(self._numbers), Future[PartMessage]()
        with self._lock:
            self._questions[number] = answer
        try:
            self.tell(PartMessage(kind, transport, number, worker, body=body))
            answered = self._wait(answer, self._answer_s)
        finally:
            with self._lock:
                del self._questions[number]
        if not answered.flag:
            raise TransportError(f"rank {self.part}: {answered.body.decode()}")
        return answered.body

    def check(self) -> None:
        """Raises TransportError where the process is lost."""
        if self._lost is not None:
            raise self._lost_error(self._lost)

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def _wait(self, future: "Future[_Told]", timeout_s: float) -> _Told:
        with self._lock:
            if self._lost is not None and not future.done():
                future.set_exception(self._lost_error(self._lost))
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise TransportError(f"rank {self.part} does not answer for {timeout_s:g} s") from None

    def _receive(self) -> None:
        try:
            while True:
                self._take(PartMessage.unpack(self._channel.receive()))
        except Exception as error:  # whatever it is: nobody else sees that this thread has ended
            self._on_lost(str(error) or type(error).__name__)
            self._channel.close()

    def _take(self, message: PartMessage) -> None:
        match Tell(message.kind):
            case Tell.HELLO if not self._hello.done():
                self._hello.set_result(PartHello.unpack(message.body))
            case Tell.ANSWER:
                with self._lock:
                    question = self._questions.get(message.number)
                    if question is not None:  # else it was waited for no longer
                        if question.done():
                            raise ValueError(f"a second answer to question {message.number}")
                        question.set_result(message)
            case Tell.END if message.transport in self._ends:
                self._ends[message.transport].put(unpack_end(message))
            case kind:
                raise ValueError(f"{kind.name} where none was expected")

    def _on_lost(self, reason: str) -> None:
        with self._lock:
            self._lost = reason
            if not self._hello.done():
                self._hello.set_exception(self._lost_error(reason))
            for question in self._questions.values():
                if not question.done():
                    question.set_exception(self._lost_error(reason))

    def _lost_error(self, reason: str) -> TransportError:
        return TransportError(f"rank {self.part} is lost: {reason}")


class RemoteTransport:
    """`Transport` over the part of another process: each call is a message, and ends of reads come as messages.

    Where the process is lost, `poll` and `post` raise TransportError as well.
    """

    def __init__(self, link: PartLink, name: str, number: int, offer: PartOffer, ends: "SimpleQueue[ReadEnd]") -> None:
        """number: of the transport in messages. ends: of its reads."""
        self.name, self.offer = name, offer
        self._link, self._number, self._ends = link, number, ends

    def descriptor(self) -> bytes:
        """Returns that of the part."""
        return self.offer.descriptor

    def reach(self, descriptor: bytes) -> Reach:
        """See `Transport.reach`."""
        return unpack_reach(self._link.ask(Ask.REACH, self._number, body=descriptor))

    def add_worker(self, worker: WorkerId, address: str, descriptor: bytes) -> None:
        """See `Transport.add_worker`."""
        self._link.ask(Ask.ADD, self._number, worker, pack_worker(address, descriptor))

    def remove_worker(self, worker: WorkerId) -> None:
        """Removes a worker. The ends of its open reads come with later polls."""
        self._link.tell(PartMessage(Ask.REMOVE, self._number, worker=worker))

    def post(self, read: BlockRead) -> None:
        """See `Transport.post`."""
        self._link.tell(PartMessage(Ask.POST, self._number, read.read_id, read.worker, body=pack_read(read)))

    def abandon(self, read_id: int) -> None:
        """Abandons a read. Its end comes with a later poll."""
        self._link.tell(PartMessage(Ask.ABANDON, self._number, read_id))

    def set_pace(self, poll_s: float) -> None:
        """See `Transport.set_pace`."""
        self._link.tell(PartMessage(Ask.PACE, self._number, body=pack_pace(poll_s)))

    def poll(self) -> list[ReadEnd]:
        """Returns the ends that have come."""
        ends = []
        try:
            while True:
                ends.append(self._ends.get_nowait())
        except Empty:
            self._link.check()
            return ends

    def close(self) -> None:
        """Closes the transport there. Raises TransportError while a read is open."""
        self._link.ask(Ask.CLOSE, self._number)
