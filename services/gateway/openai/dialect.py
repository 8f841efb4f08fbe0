"""What differs between the endpoints that generate: how a prompt is written, and how text is wrapped in JSON."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import orjson

from services.gateway.openai.choice import Update, Usage
from services.gateway.openai.neutral import Neutral
from services.gateway.openai.schema import CommonRequest

Request = TypeVar("Request", bound=CommonRequest)
RequestIn = TypeVar("RequestIn", bound=CommonRequest, contravariant=True)

DONE = b"data: [DONE]\n\n"

# No model says less than this of a token; JSON has no infinity.
LOWEST_LOGPROB = -9999.0


class Answer(Protocol):
    """Writes the answer to one request: either chunks, or one body."""

    def opening(self) -> bytes:
        """Events before the first chunk."""

    def chunk(self, update: Update) -> bytes:
        """One event."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event that reports the usage and no choice."""

    def body(self, update: Update, usage: Usage) -> bytes:
        """The whole answer; `update` holds all of the text."""


class Dialect(Protocol[Request]):
    """One endpoint.

    prompt_param: the request's field that the prompt is made of.
    """

    endpoint: str
    kind: type[Request]
    neutral: Neutral
    prompt_param: str

    async def prompt(self, request: Request, max_tokens: int) -> list[int]:
        """The prompt's token ids. Raises ApiError, also for a text that cannot fit into `max_tokens`."""

    def answer(self, request: Request, request_id: str, model: str, created: int) -> Answer:
        """A writer for this request's answer."""


class ChunkTemplate:
    """A chunk's JSON, of which only text, logprobs and finish reason change: the rest is made once for each stream."""

    def __init__(self, head: Mapping[str, Any], before_text: bytes, after_text: bytes, *, with_usage: bool) -> None:
        """The text stands between `before_text` and `after_text`, inside the choice."""
        opened = orjson.dumps(head)[:-1]
        self._head = b"data: " + opened
        self._tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._before = self._head + b',"choices":[{"index":0,' + before_text
        self._after = after_text
        self._plain_end = after_text + b',"logprobs":null,"finish_reason":null}]' + self._tail

    def plain(self, text: str) -> bytes:
        """A chunk with nothing but text."""
        return self._before + orjson.dumps(text) + self._plain_end

    def full(self, text: str, logprobs: object, finish_reason: str | None) -> bytes:
        """A chunk with everything."""
        parts = (b',"logprobs":', orjson.dumps(logprobs), b',"finish_reason":', orjson.dumps(finish_reason), b"}]")
        return self._before + orjson.dumps(text) + self._after + b"".join(parts) + self._tail

    def usage(self, usage: Usage) -> bytes:
        """A chunk without choices."""
        return self._head + b',"choices":[],"usage":' + orjson.dumps(usage.as_json()) + b"}\n\n"
