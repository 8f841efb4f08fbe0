"""The messages of rank 0 to the other ranks of its group, as bytes.

kind and numbers (12 int64)      then, of a step, the bytes of its `StepTokens`
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from services.engine.runner.base import StepTokens

_NUMBERS = struct.Struct("<12q")


class Kind(IntEnum):
    """The kinds of messages."""

    STEP = 1
    COPY = 2  # of a block
    END = 3  # of the process


@dataclass(frozen=True, slots=True)
class RankThreads:
    """The threads of each rank in one step, which is the same work for all of them."""

    number: int
    prompts: bool  # the step computes many tokens of prompts
    shares_prompts: bool  # another worker's does as well: see `CoreShare.shares_prompts`


@dataclass(frozen=True, slots=True, eq=False)
class RankStep:
    """A step as ranks above 0 get it: they compute its logits, or their part of them, and sample nothing."""

    number: int  # of the group's steps and copies
    threads: RankThreads
    samples_all: bool  # see `StepInput.samples_all`
    parts: tuple[int, int, int, int]  # see `StepInput.parts`
    tokens: StepTokens

    def pack(self) -> tuple[bytes, bytes]:
        """Returns the message, in two pieces."""
        threads = self.threads
        numbers = (threads.number, threads.prompts, threads.shares_prompts, self.samples_all)
        return _NUMBERS.pack(Kind.STEP, self.number, *numbers, *self.parts, 0, 0), self.tokens.to_bytes()


@dataclass(frozen=True, slots=True)
class RankCopy:
    """A copy of a block's KV to another block."""

    number: int
    source: int
    destination: int

    def pack(self) -> tuple[bytes]:
        """Returns the message, in one piece."""
        return (_NUMBERS.pack(Kind.COPY, self.number, self.source, self.destination, *[0] * 8),)


def pack_end() -> tuple[bytes]:
    """Returns the message after which a rank ends, in one piece."""
    return (_NUMBERS.pack(Kind.END, *[0] * 11),)


def is_end(message: bytearray) -> bool:
    """Returns True for the message after which a rank ends."""
    kind: int = _NUMBERS.unpack_from(message)[0]
    return kind == Kind.END


def unpack(message: bytearray) -> RankStep | RankCopy | None:
    """Returns what was packed; None: the end."""
    kind, number, *rest = _NUMBERS.unpack_from(message)
    match Kind(kind):
        case Kind.STEP:
            threads, prompts, shares_prompts, samples_all, *parts = rest[:8]
            tokens = StepTokens.from_bytes(message[_NUMBERS.size :])
            of_step = RankThreads(threads, bool(prompts), bool(shares_prompts))
            sampled, scored, pooled, watched = parts
            return RankStep(number, of_step, bool(samples_all), (sampled, scored, pooled, watched), tokens)
        case Kind.COPY:
            return RankCopy(number, rest[0], rest[1])
        case Kind.END:
            return None


def longest_message(num_tokens: int, num_rows: int, num_blocks: int) -> int:
    """Returns the bytes of the longest message of a step of at most so many tokens and rows, with so many entries of
    each row's block tables.
    """
    # int32 of each token: id, position, type; of each row: start, length, table. int64: a query of each, for each part.
    return _NUMBERS.size + 40 + num_tokens * (3 * 4 + 3 * 8) + (num_rows + 1) * (8 + (2 + num_blocks) * 4)
