"""The seam inside the gateway: the API side asks for tokens, the dispatch side has workers generate them.

The API side never sees a worker, an attempt or a handoff; the dispatch side never sees text.

Tokens come to the API side in one of two ways. `RunningRequest.next` waits for them, which takes a turn of the caller's
task. `RunningRequest.relay` hands them to a `Sink`, and no task wakes for them. A sink has two methods because of what
a streamed token costs: nearly all rows of frames are one token with nothing beside it. From the row to the bytes of the
event, such a token takes 1.6 µs in the short form, and 5.1 µs as a delta and an update (128 streams in one process),
where all that a streamed token costs the gateway is some 14 µs. A sink that refuses a token in the short form gets it
in a delta, so both forms together carry one sequence, in order.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from services.gateway.api.records.attempt_record import AttemptRecords
from services.protocol.capsule import Capsule
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FinishReason


class GenerationError(Exception):
    """Says why a request ended without a complete answer.

    GenerationError
    ├── Unavailable   no worker can take the request now, or none could until its deadline
    │   ├── Overloaded    there is too much other work
    │   └── Stopping      the gateway ends
    ├── TooLarge      the request fits no worker
    ├── Unsupported   workers refuse what the request asks for, or none can do it
    ├── Expired       the request's deadline passed
    └── Failed        every attempt failed
    """


class Unavailable(GenerationError):
    """No worker can take the request now; another try is worth while after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Refusal(StrEnum):
    """The reason why a request was refused before any work. The values are labels of a metric."""

    IN_FLIGHT = "in_flight"  # too many others are in flight
    SLO = "slo"  # its first token would come later than it may
    DEADLINE = "deadline"  # its first token would come after its time limit
    LOGPROBS = "logprobs"  # answers in flight may have too many logprobs
    SHARE = "share"  # its tenant has more than its share, and others wait
    KEY_REQUESTS = "key_requests"  # its key has had its requests of this minute
    KEY_TOKENS = "key_tokens"  # its key has had its tokens of this minute
    KEY_CONCURRENT = "key_concurrent"  # its key has as many requests running as it may


class Overloaded(Unavailable):
    """The request was refused before any work, since there is too much of it."""

    def __init__(self, message: str, retry_after_s: int = 1, refusal: Refusal = Refusal.IN_FLIGHT) -> None:
        super().__init__(message, retry_after_s)
        self.refusal = refusal


class Stopping(Unavailable):
    """The gateway ends, and the answer did not end in time."""


class TooLarge(GenerationError):
    """The prompt does not fit the KV memory of any worker."""


class Unsupported(GenerationError):
    """A worker refused what the request asks for, and so would any other; or no worker can do it.

    restricted: the request says which tokens there may be, and may have left none. asked: what no worker can do, in a
    client's words; empty: not known.
    """

    def __init__(self, message: str, *, restricted: bool = False, asked: str = "") -> None:
        super().__init__(message)
        self.restricted = restricted
        self.asked = asked


class Expired(GenerationError):
    """The request's deadline passed."""


class Failed(GenerationError):
    """Every attempt failed."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """All choices of one client request, ordered by prompt."""

    request_id: str
    capsules: tuple[Capsule, ...]  # by choice
    timeout_s: float
    num_choices: int = 1  # of each prompt
    ttft_slo_s: float | None = None  # the request is refused where its first token is expected later; None: never
    tenant: str = ""
    attempts: AttemptRecords = field(default_factory=AttemptRecords)  # which the dispatch side adds to
    session_id: str = ""  # requests of a tenant with the same one go to the same worker, where that has room

    @property
    def session(self) -> tuple[str, str] | None:
        """The tenant and its session; None: the request belongs to none."""
        return (self.tenant, self.session_id) if self.session_id else None


@dataclass(slots=True)
class Delta:
    """New tokens of one choice since its last delta; each position of the sequence once, in order."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None  # of `tokens`; None: not asked for
    finish: FinishReason
    cached_tokens: int  # prompt tokens that no attempt computed so far; final in the last delta
    choice: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None  # from the prompt's second token on; in the first delta
    embedding: np.ndarray | None = None  # float32[size] of a prompt that is embedded, in its only delta


TakeToken = Callable[[int], bool]  # takes the next token of one choice; False: not taken, so it comes in a delta


def never(_token: int) -> bool:
    """Takes no token: a TakeToken of sinks without a short form."""
    return False


class Sink(Protocol):
    """Takes the tokens of a request while they are relayed. No method may wait. What one raises, `relay` raises."""

    def take(self, delta: Delta) -> bool:
        """Takes all that came for a choice since its last delta. False: the sink takes no more now."""

    def token_taker(self, choice: int) -> TakeToken:
        """The short form of `take` for this choice, for single tokens that have nothing beside them."""


class RunningRequest(Protocol):
    """A running request."""

    async def next(self) -> Delta:
        """Waits for new tokens of any choice. Returns all that came for it since its last delta.

        Raises GenerationError: an error of one choice is the request's. After a delta with a finish reason there is
        none for that choice.
        """

    async def relay(self, sink: Sink) -> None:
        """Hands tokens to the sink as soon as they come, until `take` returns False. Raises as `next` does.

        The sink is mostly called outside the caller's task, which costs far less than waking it.
        """

    def end(self, choice: int) -> None:
        """Ends a choice whose client has all that it wants."""


class Generator(Protocol):
    """The dispatch side, as the API side sees it."""

    max_model_len: int | None  # of the workers that answered; None: none yet

    def ready(self) -> bool:
        """True when a request would find a worker."""

    async def until_model_len_known(self) -> int:
        """Returns `max_model_len`, at once where it is known. Raises Unavailable where no worker comes in time."""

    async def until_embedding_size_known(self) -> int:
        """Returns the numbers of an embedding.

        Raises Unavailable where no worker that embeds comes in time, and Unsupported where none is to come.
        """

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[RunningRequest]:
        """Starts a request; leaving the context ends it, wherever it is. Raises GenerationError when entered."""
