"""The messages between the two sides of a handoff."""

from dataclasses import dataclass
from enum import IntEnum

from kvtransfer.ids import AttemptId, WorkerId


class EndReason(IntEnum):
    """The reasons for which a handoff ends before its blocks have moved."""

    FINISHED = 1  # nothing to hand off: the sequence finished with its first token
    ABORTED = 2  # the gateway wants no more of it
    OVER = 3  # opened after it had ended, or its submit never came
    WRONG_WORKER = 4  # opened at another worker: this one's address was the producer's before
    FAILED = 5  # the producer's engine failed its request
    EXPIRED = 6  # its deadline passed
    WORKER_LOST = 7  # the control stream stayed away longer than the grace
    STALE = 8  # a block's generation had changed by the time it was read
    READ_FAILED = 9  # the transport could not read it
    STALLED = 10  # a read of it stood still, or the producer fell silent

    @classmethod
    def known(cls, number: int) -> "EndReason":
        """Returns the reason with this number; for one that only newer neighbours know, FAILED."""
        try:
            return cls(number)
        except ValueError:
            return cls.FAILED


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token that the producer sampled for one sequence over the prompt; the consumer does not sample it again."""

    handle: int  # of the sequence: the handoff's own, or a branch's
    token: int
    logprobs: object | None  # opaque here: travels beside the token


@dataclass(frozen=True, slots=True)
class Open:
    """Consumer to producer: give me the lease of this handoff. May be repeated.

    The answer is one announcement of everything that was announced so far, or `Ended`.
    """

    id: AttemptId
    producer: WorkerId  # the worker that is meant


@dataclass(frozen=True, slots=True)
class Release:
    """Consumer to producer: I need the blocks of this handoff no longer."""

    id: AttemptId


@dataclass(frozen=True, slots=True)
class Announcement:
    """Producer to consumer: these blocks are complete. The engine makes it, the producer passes it on unchanged.

    blocks[i] holds block first_index + i of the sequence and had generations[i] when it was announced.
    The final announcement carries the first token of each sequence that goes on from the prompt; its last block may be
    partly filled.
    """

    id: AttemptId
    first_index: int
    blocks: tuple[int, ...]
    generations: tuple[int, ...]
    first_tokens: tuple[FirstToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """Producer to consumer: this handoff has ended."""

    id: AttemptId
    reason: EndReason


@dataclass(frozen=True, slots=True)
class Pulse:
    """Producer to consumer: my control streams are served, however long my engine's step takes."""


ToProducer = Open | Release
ToConsumer = Announcement | Ended | Pulse
