"""What differs between the endpoints that generate: how a prompt is written, and how text is wrapped in JSON."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import orjson

from services.gateway.api.choice import PromptShown, Update, Usage
from services.gateway.api.prompts import Prompt
from services.gateway.api.schema import CommonRequest
from services.gateway.openai.neutral import Neutral

Request = TypeVar("Request", bound=CommonRequest)
RequestIn = TypeVar("RequestIn", bound=CommonRequest, contravariant=True)

DONE = b"data: [DONE]\n\n"

# No model says less than this of a token; JSON has no infinity.
LOWEST_LOGPROB = -9999.0


class Answer(Protocol):
    """Writes the answer to one request: either chunks, or one body."""

    @property
    def text_chunk(self) -> Callable[[int, str], bytes]:
        """Makes an event with nothing but text, of a choice."""

    def opening(self, num_choices: int) -> bytes:
        """Events before the first chunk."""

    def chunk(self, update: Update) -> bytes:
        """One event."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event that reports the usage and no choice."""

    def body(self, choices: Sequence[Update], usage: Usage) -> bytes:
        """The whole answer; an update holds all of a choice."""


class Dialect(Protocol[Request]):
    """One endpoint.

    prompt_param: the request's field that the prompt is made of.
    """

    endpoint: str
    kind: type[Request]
    neutral: Neutral
    prompt_param: str

    async def prompts(self, request: Request, max_tokens: int) -> list[Prompt]:
        """The request's prompts, at least one. Raises ApiError, also for a text that cannot fit into `max_tokens`."""

    def shown(self, request: Request, prompt: Prompt) -> PromptShown | None:
        """What the answer shows of a prompt; None: nothing."""

    def answer(self, request: Request, request_id: str, model: str, created: int) -> Answer:
        """A writer for this request's answer."""


class ChunkTemplate:
    """A chunk's JSON, of which only choice, text, logprobs and finish reason change: the rest is made once a stream."""

    def __init__(self, head: Mapping[str, Any], before_text: bytes, after_text: bytes, *, with_usage: bool) -> None:
        """The text stands between `before_text` and `after_text`, inside the choice."""
        opened = orjson.dumps(head)[:-1]
        self._head = b"data: " + opened
        self._tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._before_text = before_text
        self._before: dict[int, bytes] = {}  # by choice
        self._after = after_text
        self._plain_end = after_text + b',"logprobs":null,"finish_reason":null}]' + self._tail

    def plain(self, choice: int, text: str) -> bytes:
        """A chunk with nothing but text."""
        return (self._before.get(choice) or self._opened(choice)) + orjson.dumps(text) + self._plain_end

    def full(self, update: Update, logprobs: object) -> bytes:
        """A chunk with everything."""
        finish_reason = orjson.dumps(update.finish_reason)
        parts = (b',"logprobs":', orjson.dumps(logprobs), b',"finish_reason":', finish_reason, b"}]")
        return self._opened(update.choice) + orjson.dumps(update.text) + self._after + b"".join(parts) + self._tail

    def usage(self, usage: Usage) -> bytes:
        """A chunk without choices."""
        return self._head + b',"choices":[],"usage":' + orjson.dumps(usage.as_json()) + b"}\n\n"

    def _opened(self, choice: int) -> bytes:
        before = self._before.get(choice)
        if before is None:
            before = self._before[choice] = self._head + b',"choices":[{"index":%d,' % choice + self._before_text
        return before
