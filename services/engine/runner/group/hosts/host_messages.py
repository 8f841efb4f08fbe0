"""The messages between rank 0 and a rank on another host. The first byte says which, JSON follows in most.

    rank 1                                                   rank 0
    HELLO     its number, the size, its version ──────────▶
              ◀────────── TERMS, or REFUSED    the engine's configuration, the model's fingerprint
    ROOM, or REFUSED  the blocks it has memory for ───────▶  waits for all ranks
              ◀────────── START                as many blocks as every rank has room for
    SET       Gloo's ranks find each other ◀──────────────▶  by what each has set
    ANSWER    it has loaded, or cannot ───────────────────▶
              ◀────────── STEP                 again and again
    DONE      ────────────────────────────────────────────▶

A second connection of the rank, for KV, has HELLO and KV, or REFUSED, and then the messages of KV.
"""

import base64
import json
import struct
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from importlib.metadata import version
from typing import Any, Self, get_args

MOST_GREETING_BYTES = 64 * 1024  # of a message before START; whoever connects may send one
_DONE = struct.Struct("<Bd")
BATON_VERSION = version("baton-serve")


class Say(IntEnum):
    """The kinds of messages."""

    HELLO = 1
    TERMS = 2
    REFUSED = 3
    ROOM = 4
    START = 5
    SET = 6
    ANSWER = 7
    STEP = 8
    DONE = 9
    KV = 10


class StrangeMessageError(Exception):
    """A message that is not one of these, or not one that was expected. The message is one line."""


class _Json:
    """A message whose fields travel as JSON."""

    say: Say

    def pack(self) -> tuple[bytes, bytes]:
        """Returns the message, in two pieces."""
        return bytes((self.say,)), json.dumps(asdict(self), default=str).encode()  # type: ignore[call-overload]

    @classmethod
    def unpack(cls, message: bytearray) -> Self:
        """Reads a message. Raises StrangeMessageError for another kind, RefusedError for a refusal."""
        if message[0] == Say.REFUSED and cls.say is not Say.REFUSED:
            refused = Refused.unpack(message)
            raise RefusedError(refused.reason, again=refused.again)
        if message[0] != cls.say:
            raise StrangeMessageError(f"another message than {cls.say.name}")
        try:
            said = json.loads(message[1:])
            own = {field.name: _checked(said[field.name], field.type) for field in fields(cls)}  # type: ignore[arg-type]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StrangeMessageError(f"no message of this version: {type(error).__name__}") from error
        return cls(**own)


class RefusedError(Exception):
    """A refusal by the other end, in words. again: it may be over in a moment."""

    def __init__(self, reason: str, *, again: bool) -> None:
        super().__init__(reason)
        self.again = again


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(_Json):
    """The first message of a connection."""

    say = Say.HELLO
    version: str  # of Baton
    rank: int
    size: int  # of the group
    group: str  # for KV: of the group that has started; empty: the rank wants to join


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms(_Json):
    """The terms of the group, which hold on all ranks."""

    say = Say.TERMS
    group: str  # random
    engine: dict[str, Any]  # rank 0's configuration
    fingerprint: str
    kernels: str  # the class of processors for which kernels are compiled, or "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(_Json):
    """The words by which one end refuses the other."""

    say = Say.REFUSED
    reason: str
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTaken(_Json):
    """The answer to the HELLO of a connection for KV, which rank 0 has now."""

    say = Say.KV


@dataclass(frozen=True, slots=True, kw_only=True)
class Room(_Json):
    """The room that a host has for its rank."""

    say = Say.ROOM
    num_blocks: int | None  # of its pool; None: the configuration says how much memory KV gets
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(_Json):
    """The signal to load, as all ranks are there."""

    say = Say.START
    num_blocks: int
    longest: int  # bytes of a step's message, at most


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a step or a copy on a rank."""

    waited_s: float  # see `StepReader.done`

    def pack(self) -> bytes:
        """Returns the message."""
        return _DONE.pack(Say.DONE, self.waited_s)

    @classmethod
    def unpack(cls, message: bytearray) -> Self:
        """Reads the message. Raises StrangeMessageError."""
        if len(message) != _DONE.size:
            raise StrangeMessageError("an end of a step that is of another length")
        return cls(_DONE.unpack(message)[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(_Json):
    """An entry that a rank has set in the store by which Gloo's ranks find each other."""

    say = Say.SET
    key: str
    base64: str

    @classmethod
    def of(cls, key: str, value: bytes) -> Self:
        """Makes the message of a key and its value."""
        return cls(key=key, base64=base64.b64encode(value).decode())

    @property
    def value(self) -> bytes:
        """Returns the value. Raises StrangeMessageError."""
        try:
            return base64.b64decode(self.base64, validate=True)
        except ValueError as error:
            raise StrangeMessageError("a value that is not base64") from error


def _checked(value: Any, kind: Any) -> Any:
    allowed = get_args(kind) or (kind,) if kind != dict[str, Any] else (dict,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise TypeError(kind)
    return value
