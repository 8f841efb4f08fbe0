"""The messages between a worker's own process and one that has another part of its memory, as bytes.

kind, transport, flag (3 bytes), number and worker (2 uint64), then what the kind says:

    Ask.BEGIN     the name of a transport, or of a choice of them
    Ask.REACH     descriptor
    Ask.ADD       address, a zero byte, descriptor
    Ask.POST      uint32 source[n], uint32 destination[n], uint64 generations[n]
    Ask.PACE      float64, seconds
    Tell.HELLO    JSON: see PartHello
    Tell.ANSWER   flag 1: JSON of a Reach, or nothing; flag 0: why not, in words
    Tell.END      flag 1: uint64 generations[n]; flag 0: nothing, the read failed
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np

from kvtransfer.ids import WorkerId
from kvtransfer.process import ProcessIdentity
from kvtransfer.transports.base import BlockRead, Reach, ReadEnd
from kvtransfer.transports.parts import PartOffer

_HEAD = struct.Struct("<BBBQQ")
_PACE = struct.Struct("<d")
_BLOCK_BYTES = 16  # of one block in a message of a read


class ChannelLostError(Exception):
    """The other process cannot be reached any more. The message is one line."""


class MessageChannel(Protocol):
    """Messages to and from one other process, in order. Any thread may send, one receives."""

    def send(self, parts: Sequence[bytes]) -> None:
        """Sends the parts as one message. Raises ChannelLostError."""

    def receive(self) -> bytearray:
        """Waits for the next message. Raises ChannelLostError."""

    def close(self) -> None:
        """Closes the channel: both ends then raise ChannelLostError, also where they wait."""


class Ask(IntEnum):
    """The messages of the worker's own process."""

    REACH = 1  # `number` names the question
    ADD = 2  # likewise
    REMOVE = 3
    POST = 4  # `number` is the read's id
    ABANDON = 5  # likewise
    PACE = 6
    CLOSE = 7  # `number` names the question
    BEGIN = 8  # the first message: `worker` is the worker's own id


class Tell(IntEnum):
    """The messages of the process that has a part."""

    HELLO = 1
    ANSWER = 2  # `number` names the question
    END = 3  # `number` is the read's id


@dataclass(frozen=True, slots=True)
class PartMessage:
    """One message."""

    kind: int  # Ask or Tell
    transport: int = 0  # its place in the hello
    number: int = 0
    worker: int = 0
    flag: bool = False
    body: bytes = b""

    def pack(self) -> tuple[bytes, bytes]:
        """Returns the message, in two pieces."""
        return _HEAD.pack(self.kind, self.transport, self.flag, self.number, self.worker), self.body

    @classmethod
    def unpack(cls, packed: bytes | bytearray) -> "PartMessage":
        """Reads what `pack` made. Raises ValueError for what is too short."""
        if len(packed) < _HEAD.size:
            raise ValueError(f"a message of {len(packed)} bytes")
        kind, transport, flag, number, worker = _HEAD.unpack_from(packed)
        return cls(kind, transport, number, worker, bool(flag), bytes(packed[_HEAD.size :]))


@dataclass(frozen=True, slots=True)
class PartHello:
    """All that the worker's own process must know of one that has a part."""

    offers: dict[str, PartOffer]  # by the transport's name
    process: ProcessIdentity | None  # None: it cannot be told

    def pack(self) -> bytes:
        """Returns the body of the message."""
        offers = {name: (offer.address, offer.descriptor.hex()) for name, offer in self.offers.items()}
        process = None if self.process is None else asdict(self.process)
        return json.dumps({"offers": offers, "process": process}).encode()

    @classmethod
    def unpack(cls, body: bytes) -> "PartHello":
        """Reads what `pack` made. Raises ValueError."""
        try:
            said = json.loads(body)
            offers = {name: PartOffer(address, bytes.fromhex(key)) for name, (address, key) in said["offers"].items()}
            return cls(offers, None if said["process"] is None else ProcessIdentity(**said["process"]))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"a hello that cannot be read: {error!r}") from error


def pack_worker(address: str, descriptor: bytes) -> bytes:
    """Returns the body of Ask.ADD."""
    return address.encode() + b"\0" + descriptor


def unpack_worker(body: bytes) -> tuple[str, bytes]:
    """Reads address and descriptor."""
    address, _, descriptor = body.partition(b"\0")
    return address.decode(), descriptor


def pack_read(read: BlockRead) -> bytes:
    """Returns the body of Ask.POST."""
    arrays = read.source.astype("<u4"), read.destination.astype("<u4"), read.generations.astype("<u8")
    return b"".join(array.tobytes() for array in arrays)


def unpack_read(message: PartMessage) -> BlockRead:
    """Reads a read."""
    count = len(message.body) // _BLOCK_BYTES
    blocks = np.frombuffer(message.body, "<u4", 2 * count)
    generations = np.frombuffer(message.body, "<u8", count, offset=8 * count)
    return BlockRead(message.number, WorkerId(message.worker), blocks[:count], blocks[count:], generations)


def pack_end(end: ReadEnd) -> bytes:
    """Returns the body of Tell.END."""
    return b"" if end.generations is None else end.generations.astype("<u8").tobytes()


def unpack_end(message: PartMessage) -> ReadEnd:
    """Reads the end of a read."""
    return ReadEnd(message.number, np.frombuffer(message.body, "<u8") if message.flag else None)


def pack_reach(reach: Reach) -> bytes:
    """Returns the body of an answer."""
    return json.dumps(asdict(reach)).encode()


def unpack_reach(body: bytes) -> Reach:
    """Reads an answer."""
    return Reach(**json.loads(body))


def pack_pace(poll_s: float) -> bytes:
    """Returns the body of Ask.PACE."""
    return _PACE.pack(poll_s)


def unpack_pace(body: bytes) -> float:
    """Reads the seconds between two polls."""
    return float(_PACE.unpack(body)[0])
