"""The endpoints of OpenAI's API that a load is sent to: the body of a request, and what an event of its answer says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from loadtest.bench.script import Turn
from loadtest.http_stream import HttpError

Message = Mapping[str, str]
_LONGEST_SHOWN = 80  # of what a server sent


def object_of(value: Any, name: str) -> Mapping[str, Any]:
    """An object in an answer, empty where it is null or missing. Raises HttpError where something else is there."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise HttpError(f"{name} of an event is no object: {str(value)[:_LONGEST_SHOWN]}")
    return value


def objects_of(value: Any, name: str) -> Sequence[Mapping[str, Any]]:
    """A list of objects in an answer, likewise; each of them is one."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise HttpError(f"{name} of an event are no list of objects: {str(value)[:_LONGEST_SHOWN]}")
    return value


@dataclass(frozen=True, slots=True)
class Common:
    """Fields of every request. ignore_eos: answers have exactly their length, so that runs can be compared."""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def fields(self, turn: Turn) -> dict[str, Any]:
        """All fields of a request but its prompt; those of a turn, and then `extra`, come first."""
        fields = {
            "model": self.model,
            "max_tokens": turn.output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return {**fields, **turn.fields, **self.extra}


class Endpoint(Protocol):
    """An endpoint that answers as an event stream."""

    @property
    def path(self) -> str:
        """The path, from /v1 on."""

    def body(self, turn: Turn, history: Sequence[Message]) -> bytes:
        """Makes the body of a turn behind what was said before."""

    def has_token(self, choice: Mapping[str, Any]) -> bool:
        """Says whether an event with this choice stands for a token, as far as its fields tell. Raises HttpError."""

    def text(self, choice: Mapping[str, Any]) -> str:
        """The text that an event adds to the answer. Raises HttpError."""


@dataclass(frozen=True, slots=True)
class Completions:
    """/v1/completions, with a prompt of token ids or of text. It knows no conversations: a history is put before it."""

    common: Common
    path: str = "/v1/completions"

    def body(self, turn: Turn, history: Sequence[Message]) -> bytes:
        """See `Endpoint.body`."""
        prompt = turn.prompt
        if history:
            assert isinstance(prompt, str)
            prompt = "\n\n".join([*(message["content"] for message in history), prompt])
        return orjson.dumps({"prompt": prompt, **self.common.fields(turn)})

    def has_token(self, choice: Mapping[str, Any]) -> bool:
        """Says yes: a token may have no text."""
        return True

    def text(self, choice: Mapping[str, Any]) -> str:
        """See `Endpoint.text`."""
        return str(choice.get("text") or "")


@dataclass(frozen=True, slots=True)
class Chat:
    """/v1/chat/completions."""

    common: Common
    path: str = "/v1/chat/completions"

    def body(self, turn: Turn, history: Sequence[Message]) -> bytes:
        """See `Endpoint.body`."""
        messages = [*history, {"role": "user", "content": turn.prompt}]
        return orjson.dumps({"messages": messages, **self.common.fields(turn)})

    def has_token(self, choice: Mapping[str, Any]) -> bool:
        """Says no to an event that has a role alone: some servers send it before they begin."""
        delta = object_of(choice.get("delta"), "delta")
        return choice.get("finish_reason") is not None or any(
            value for name, value in delta.items() if name not in ("role", "refusal")
        )

    def text(self, choice: Mapping[str, Any]) -> str:
        """The text that an event adds to the answer, and the arguments that it adds to calls of tools."""
        delta = object_of(choice.get("delta"), "delta")
        calls = objects_of(delta.get("tool_calls"), "tool_calls")
        functions = [object_of(call.get("function"), "function") for call in calls]
        return "".join(
            str(text) for text in (delta.get("content"), *(each.get("arguments") for each in functions)) if text
        )
