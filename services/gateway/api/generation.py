"""The seam inside the gateway: the API side asks for tokens, the dispatch side has them made.

The API side never sees a worker, an attempt or a handoff; the dispatch side never sees text.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from services.protocol.capsule import Capsule
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FinishReason


class GenerationError(Exception):
    """A request ended without a complete answer.

    GenerationError
    ├── Unavailable   no worker can take it now; nothing was done for it, or it waited until its deadline
    │   └── Overloaded    there are too many others
    ├── TooLarge      it cannot fit any worker
    ├── Expired       its deadline passed
    └── Failed        its attempts failed
    """


class Unavailable(GenerationError):
    """503; `retry_after_s` says when to come back."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(Unavailable):
    """More requests are in flight than the gateway takes."""


class TooLarge(GenerationError):
    """The prompt does not fit the KV memory of any worker."""


class Expired(GenerationError):
    """The request's deadline passed."""


class Failed(GenerationError):
    """Every attempt failed."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One client request: all its choices, `num_choices` for each of its prompts, one prompt's next to each other."""

    request_id: str
    capsules: tuple[Capsule, ...]  # by choice
    timeout_s: float
    num_choices: int = 1


@dataclass(slots=True)
class Delta:
    """New tokens of one choice since its last delta; each position of the sequence once, in order."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None  # beside tokens, when asked for
    finish: FinishReason
    cached_tokens: int  # prompt tokens found in a cache; known with the first delta
    choice: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None  # from the prompt's second token on; in the first delta


TakeToken = Callable[[int], bool]  # the next token of a choice; False: it was not taken


def never(_token: int) -> bool:
    """A TakeToken."""
    return False


class Generation(Protocol):
    """A running request."""

    async def next(self) -> Delta:
        """Waits for new tokens of any choice; all that came for it since its last delta, in one.

        Raises GenerationError: what ends one choice so ends the request. After a delta with a finish reason there is
        none for that choice.
        """

    async def relay(self, take: Callable[[Delta], bool], takers: Sequence[TakeToken] | None = None) -> None:
        """Hands every delta to `take` as soon as its tokens are there, until that returns False. Raises as `next` does.

        What is a token and nothing else goes to its choice's one of `takers`, which costs less, and to `take` where
        that refuses it. None of them must wait. They are mostly called outside this task, which costs far less than
        waking it; what they raise is raised here.
        """

    def end(self, choice: int) -> None:
        """No more of this choice: its client has all that it wants."""


class Generator(Protocol):
    """The dispatch side, as the API side sees it."""

    max_model_len: int | None  # of the workers that answered; None: none yet

    def ready(self) -> bool:
        """True when a request would find a worker."""

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[Generation]:
        """Starts a request; leaving the context ends it, wherever it is. Raises GenerationError when entered."""
