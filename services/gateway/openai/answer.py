"""Answers as JSON: the interface of their writers, and the chunk that streams repeat."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

import orjson

from services.gateway.api.answers.choice import Update, Usage
from services.gateway.api.requests.schema import CommonRequest
from services.gateway.api.requests.validation import Neutral
from services.gateway.api.served_models import ServedModel
from services.protocol.frames import TokenLogprobs
from services.protocol.sampling import FEW_ALTERNATIVES

DONE = b"data: [DONE]\n\n"

_SLICE = 256  # tokens with few alternatives each, or alternatives
_FEW_LOGPROBS = 128

LOWEST_LOGPROB = -9999.0  # lower ones are reported as this: JSON has no infinity

_Entry = TypeVar("_Entry")
_RequestIn = TypeVar("_RequestIn", bound=CommonRequest, contravariant=True)


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that all parts of an answer begin with. `created` is in seconds since 1970."""

    request_id: str
    model: str
    created: int
    fingerprint: str

    @classmethod
    def of(cls, request_id: str, model: ServedModel) -> "AnswerHead":
        """Returns the head of an answer that a model begins now."""
        return cls(request_id, model.name, int(time.time()), model.base.fingerprint)

    def as_json(self, prefix: str) -> dict[str, Any]:
        """The fields. prefix: of the answer's id."""
        return {
            "id": f"{prefix}-{self.request_id}",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class PromptIds(Enum):
    """The place of a prompt's token ids in an answer, where they are asked for."""

    IN_CHOICE = auto()
    BESIDE_CHOICES = auto()
    OPENED = auto()  # in the events before the first chunk, and not in chunks


class Answer(Protocol):
    """Writes the answer to one request: chunks, or one body."""

    @property
    def text_chunk(self) -> Callable[[int, str], bytes]:
        """Returns an event with text of a choice and nothing else."""

    def opening(self, num_choices: int, first: Update, usage: Usage | None = None) -> bytes:
        """The events before the first chunk, which is that of `first`. usage: so far, where every event has it."""

    def chunk(self, update: Update, usage: Usage | None = None) -> bytes:
        """The event for an update. usage: so far, where every event has it."""

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

    def answer(self, request: _RequestIn, head: AnswerHead) -> Answer:
        """Returns a writer for the answer to this request."""


def json_array(entries: Iterable[object]) -> orjson.Fragment:
    """Returns the JSON of a long list, made in slices: one call would keep the interpreter lock all the time."""
    return orjson.Fragment(b"[%b]" % b",".join(orjson.dumps(each)[1:-1] for each in _slices(entries)))


def json_object(fields: Iterable[tuple[str, object]]) -> orjson.Fragment:
    """Returns the JSON of a large object, no name twice, likewise."""
    return orjson.Fragment(b"{%b}" % b",".join(orjson.dumps(dict(each))[1:-1] for each in _slices(fields)))


def _slices(entries: Iterable[_Entry]) -> Iterator[list[_Entry]]:
    left = iter(entries)
    while some := list(islice(left, _SLICE)):
        yield some


def takes_long(update: Update) -> bool:
    """True for an update with so many logprobs that their JSON should be made beside the event loop."""
    own, of_prompt = update.logprobs or (), update.prompt_logprobs or ()
    if len(own) + len(of_prompt) > _FEW_LOGPROBS:
        return True
    return any(entry is not None and has_many(entry) for entry in chain(own, (entry for _, entry in of_prompt)))


def has_many(logprobs: TokenLogprobs) -> bool:
    """True for a token with so many alternatives that their JSON is made in slices."""
    return len(logprobs.top) > FEW_ALTERNATIVES


class ChunkTemplate:
    """The JSON of a stream's chunks. Only choice, text, logprobs and finish reason change; the rest is made once."""

    def __init__(
        self,
        head: Mapping[str, Any],
        before_text: bytes,
        after_text: bytes,
        *,
        with_usage: bool,
        prompt_ids: PromptIds | None = None,
    ) -> None:
        """`before_text` and `after_text` are the JSON around the text, inside the choice.

        prompt_ids: where those are; None: chunks have no token ids.
        """
        self._prompt_ids = prompt_ids
        opened = orjson.dumps(head)[:-1]
        self._head = b"data: " + opened
        self._tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._before_text = before_text
        self._before: dict[int, bytes] = {}  # by choice
        self._after = after_text
        self._plain_end = after_text + b',"logprobs":null,"finish_reason":null}]' + self._tail

    def plain(self, choice: int, text: object) -> bytes:
        """A chunk with text, or a value in its place, and nothing else."""
        return (self._before.get(choice) or self._opened(choice)) + orjson.dumps(text) + self._plain_end

    def full(self, update: Update, logprobs: object, usage: Usage | None = None) -> bytes:
        """A chunk with text, logprobs, finish and stop reason, and with token ids and usage where those are wanted."""
        return self.of(update, update.text, logprobs, usage)

    def of(self, update: Update, value: object, logprobs: object = None, usage: Usage | None = None) -> bytes:
        """A full chunk with any value in the place of the text."""
        own: dict[str, object] = {"logprobs": logprobs, "finish_reason": update.finish_reason}
        if update.finish_reason is not None:
            own["stop_reason"] = update.stop_reason
        beside: dict[str, object] = {}
        if self._prompt_ids is not None:
            own["token_ids"] = update.generated
            if update.prompt_token_ids is not None and self._prompt_ids is not PromptIds.OPENED:
                place = own if self._prompt_ids is PromptIds.IN_CHOICE else beside
                place["prompt_token_ids"] = json_array(update.prompt_token_ids)
        end = b"," + orjson.dumps(own)[1:-1] + b"}]" + (b"," + orjson.dumps(beside)[1:-1] if beside else b"")
        tail = self._tail if usage is None else b',"usage":' + orjson.dumps(usage.as_json()) + b"}\n\n"
        return self._opened(update.choice) + orjson.dumps(value) + self._after + end + tail

    def usage(self, usage: Usage) -> bytes:
        """A chunk with the usage and without choices."""
        return self._head + b',"choices":[],"usage":' + orjson.dumps(usage.as_json()) + b"}\n\n"

    def _opened(self, choice: int) -> bytes:
        before = self._before.get(choice)
        if before is None:
            before = self._before[choice] = self._head + b',"choices":[{"index":%d,' % choice + self._before_text
        return before
