"""Answers as JSON: the interface of their writers, and the chunk that streams repeat."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import orjson

from services.gateway.api.choice import Update, Usage
from services.gateway.api.schema import CommonRequest
from services.gateway.api.validation import Neutral

DONE = b"data: [DONE]\n\n"

_SLICE = 256  # tokens with up to 20 alternatives each
_FEW_LOGPROBS = 128

LOWEST_LOGPROB = -9999.0  # lower ones are reported as this: JSON has no infinity

_RequestIn = TypeVar("_RequestIn", bound=CommonRequest, contravariant=True)


class Answer(Protocol):
    """Writes the answer to one request: chunks, or one body."""

    @property
    def text_chunk(self) -> Callable[[int, str], bytes]:
        """Returns an event with text of a choice and nothing else."""

    def opening(self, num_choices: int) -> bytes:
        """The events before the first chunk."""

    def chunk(self, update: Update) -> bytes:
        """The event for an update."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event that reports the usage and no choice."""

    def body(self, choices: Sequence[Update], usage: Usage) -> bytes:
        """The whole answer. Each update holds all of a choice."""


class AnswerFormat(Protocol[_RequestIn]):
    """The JSON of one endpoint.

    neutral: fields beside those of the request's model that a client may send as long as they ask for nothing.
    """

    @property
    def neutral(self) -> Neutral:
        """See Neutral."""

    def answer(self, request: _RequestIn, request_id: str, model: str, created: int) -> Answer:
        """Returns a writer for the answer to this request. `created` is in seconds since 1970."""


def json_array(entries: Sequence[object]) -> orjson.Fragment:
    """Returns the JSON of a long list, made in slices: one call would keep the interpreter lock all the time."""
    slices = (entries[start : start + _SLICE] for start in range(0, len(entries), _SLICE))
    return orjson.Fragment(b"[%b]" % b",".join(orjson.dumps(each)[1:-1] for each in slices))


def takes_long(update: Update) -> bool:
    """True for an update with so many logprobs that their JSON should be made beside the event loop."""
    return len(update.logprobs or ()) + len(update.prompt_logprobs or ()) > _FEW_LOGPROBS


class ChunkTemplate:
    """The JSON of a stream's chunks. Only choice, text, logprobs and finish reason change; the rest is made once."""

    def __init__(self, head: Mapping[str, Any], before_text: bytes, after_text: bytes, *, with_usage: bool) -> None:
        """`before_text` and `after_text` are the JSON around the text, inside the choice."""
        opened = orjson.dumps(head)[:-1]
        self._head = b"data: " + opened
        self._tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._before_text = before_text
        self._before: dict[int, bytes] = {}  # by choice
        self._after = after_text
        self._plain_end = after_text + b',"logprobs":null,"finish_reason":null}]' + self._tail

    def plain(self, choice: int, text: str) -> bytes:
        """A chunk with text and nothing else."""
        return (self._before.get(choice) or self._opened(choice)) + orjson.dumps(text) + self._plain_end

    def full(self, update: Update, logprobs: object) -> bytes:
        """A chunk with text, logprobs and finish reason."""
        return self.of(update.choice, update.text, logprobs, update.finish_reason)

    def of(self, choice: int, value: object, logprobs: object = None, finish_reason: str | None = None) -> bytes:
        """A chunk with any value in the place of the text."""
        parts = (b',"logprobs":', orjson.dumps(logprobs), b',"finish_reason":', orjson.dumps(finish_reason), b"}]")
        return self._opened(choice) + orjson.dumps(value) + self._after + b"".join(parts) + self._tail

    def usage(self, usage: Usage) -> bytes:
        """A chunk with the usage and without choices."""
        return self._head + b',"choices":[],"usage":' + orjson.dumps(usage.as_json()) + b"}\n\n"

    def _opened(self, choice: int) -> bytes:
        before = self._before.get(choice)
        if before is None:
            before = self._before[choice] = self._head + b',"choices":[{"index":%d,' % choice + self._before_text
        return before
