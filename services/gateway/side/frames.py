"""Jobs and their ends as bytes, between a gateway, its forker and the process of each job.

    gateway ──▶ forker     the setup: its length, JSON. Then jobs: head, value. A head with no value ends its job.
    forker ──▶ job         the same head and value
    job ──▶ forker         the length of its answer, the answer
    forker ──▶ gateway     head, answer. The first one, READY's, is empty: the forker has loaded what jobs need.

Values and answers are JSON. Nothing is unpickled.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum, StrEnum, auto
from typing import NamedTuple

LENGTH = struct.Struct("!Q")
READY = 0  # the number of no job


class JobKind(StrEnum):
    """The things that jobs do."""

    GRAMMAR = auto()  # follows a grammar for one token
    TEMPLATE = auto()  # renders a chat template


class JobEnd(IntEnum):
    """The ways in which a job ends. The numbers are on the wire."""

    DONE = 0
    TIME = 1  # it used the processor for as long as it may
    STARVED = 2  # the processors did not give it that time, nor was it done
    SIZE = 3  # its answer is too large
    DIED = 4  # by its memory limit, or otherwise through what it did
    NO_PROCESS = 5  # there was none for it, or others ended that


@dataclass(frozen=True, slots=True)
class JobLimits:
    """The limits of one job.

    cpu_s: on a processor. wall_s: on the clock, for machines that have no processor free for it.
    memory_bytes: beyond what every process has from the start.
    """

    cpu_s: float
    wall_s: float
    memory_bytes: int
    answer_bytes: int


class JobHead(NamedTuple):
    """The head of a job. length: of its value, in bytes; 0: the job is to end."""

    number: int
    cpu_ms: int
    wall_ms: int
    memory_bytes: int
    answer_bytes: int
    length: int


class AnswerHead(NamedTuple):
    """The head of an answer."""

    number: int
    end: int
    length: int


_JOB_HEAD = struct.Struct("!QIIQQQ")
_ANSWER_HEAD = struct.Struct("!QBQ")
JOB_HEAD_BYTES = _JOB_HEAD.size
ANSWER_HEAD_BYTES = _ANSWER_HEAD.size


def job_frame(number: int, limits: JobLimits, value: bytes) -> bytes:
    """Returns a job with its value; empty: the job that has this number is to end."""
    cpu_ms, wall_ms = round(limits.cpu_s * 1000), round(limits.wall_s * 1000)
    head = JobHead(number, cpu_ms, wall_ms, limits.memory_bytes, limits.answer_bytes, len(value))
    return _JOB_HEAD.pack(*head) + value


def read_job_head(data: bytes | bytearray) -> JobHead:
    """Reads the JOB_HEAD_BYTES at the beginning of `data`."""
    return JobHead(*_JOB_HEAD.unpack_from(data))


def answer_frame(number: int, end: JobEnd, answer: bytes | bytearray = b"") -> bytes:
    """Returns an answer with its head."""
    return _ANSWER_HEAD.pack(number, end, len(answer)) + answer


def read_answer_head(data: bytes) -> AnswerHead:
    """Reads the ANSWER_HEAD_BYTES of an answer."""
    return AnswerHead(*_ANSWER_HEAD.unpack(data))
