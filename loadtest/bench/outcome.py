"""The outcome of one request: when its parts came, how many tokens it had, or why it failed."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from loadtest.http_stream import HttpError, NoConnection, StatusError


class FailureKind(StrEnum):
    """The kinds of failures that are told apart, beside statuses."""

    NO_CONNECTION = "no connection"
    BROKEN = "broke off"
    TIMEOUT = "timed out"
    IN_STREAM = "error in the stream"
    EMPTY = "no token"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed request. kind: a `FailureKind`, or `status N`; text: one line for a person. status: of HTTP, if any."""

    kind: str
    text: str
    status: int | None = None

    @classmethod
    def of(cls, error: HttpError) -> "Failure":
        """The failure that an error of HTTP is."""
        match error:
            case StatusError():
                return cls(f"status {error.status}", str(error), error.status)
            case NoConnection():
                return cls(FailureKind.NO_CONNECTION, str(error))
            case _:
                return cls(FailureKind.BROKEN, str(error))


@dataclass(slots=True)
class Outcome:
    """One request. Times are of one monotonic clock, in seconds.

    parts_s: when each part of the answer came, that is each event that stands for a token; of a failure, when the first
    one did, where one did, and when the request ended. ended_s: when its connection did, whatever came.
    due_s: when the request was to be sent; input_tokens: None where the server does not say.
    """

    sent_s: float = 0.0
    parts_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    failure: Failure | None = None
    due_s: float | None = None
    ended_s: float = 0.0
    connected_s: float | None = None
    input_tokens: int | None = None
    has_usage: bool = True
    text: str = ""  # where somebody wants it

    @property
    def ttft_s(self) -> float:
        """Seconds until the first part, which is the first token."""
        return self.parts_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Seconds until the last part."""
        return self.parts_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None when there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.parts_s[-1] - self.parts_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> np.ndarray:
        """Seconds between parts: between tokens, where the server sends each alone."""
        return np.diff(self.parts_s)
