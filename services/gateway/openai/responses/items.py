"""The items of a conversation: what a request sends, and what an answer has and a client sends back."""

import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from services.gateway.api.strict import Open

MAX_ITEMS = 2048  # of a conversation, as many as a chat may have messages

_TEXTS = ("input_text", "output_text", "text")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")

Role = Literal["user", "assistant", "system", "developer"]


def new_id(prefix: str) -> str:
    """Returns a new id of an item: `msg_` and 32 hexadecimal digits, or another prefix."""
    return f"{prefix}_{secrets.token_hex(16)}"


def _as_parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _supported_part(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in _TEXTS:
        raise PydanticCustomError("unsupported", "Parts of type '{kind}' are not supported.", {"kind": kind[:64]})
    return value


def _unencrypted(value: str | None) -> str | None:
    if value is not None:
        raise PydanticCustomError("unsupported", "Encrypted reasoning is not supported.")
    return value


class TextPart(Open):
    """A text of a message, or of a function's output.

    annotations, logprobs: those of an earlier answer, which a client may send back; nothing reads them.
    """

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Parts = Annotated[
    list[Annotated[TextPart, BeforeValidator(_supported_part)]],
    Field(min_length=1, fail_fast=True),
    BeforeValidator(_as_parts),
]


class ReasoningText(Open):
    """A text of a reasoning item."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class Item(Protocol):
    """An item of a conversation."""

    @property
    def texts(self) -> list[str]:
        """The texts of its parts; of a call, the arguments."""

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""

    def as_json(self) -> dict[str, Any]:
        """Returns the item as answers list it, with an id."""


class MessageItem(Open):
    """A message of the user, the developer or the assistant."""

    type: Literal["message"] = "message"
    role: Role
    content: Parts
    id: str | None = None
    status: str | None = None

    @property
    def texts(self) -> list[str]:
        """See Item."""
        return [part.text for part in self.content]

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        for number, part in enumerate(self.content):
            yield from (f"content[{number}].{name}" for name in part.unknown_fields())

    def as_json(self) -> dict[str, Any]:
        """See Item."""
        about = {"id": self.id or new_id("msg"), "type": self.type, "role": self.role}
        return {**about, "status": self.status or "completed", "content": [self._part(part) for part in self.content]}

    def _part(self, part: TextPart) -> dict[str, Any]:
        if self.role != "assistant":
            return {"type": "input_text", "text": part.text}
        return {
            "type": "output_text",
            "text": part.text,
            "annotations": part.annotations or [],
            "logprobs": part.logprobs or [],
        }


class FunctionCallItem(Open):
    """A call of a function by the assistant. `arguments` is JSON."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    id: str | None = None
    status: str | None = None

    @property
    def texts(self) -> list[str]:
        """See Item."""
        return [self.arguments]

    def as_json(self) -> dict[str, Any]:
        """See Item."""
        call = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return {"id": self.id or new_id("fc"), "type": self.type, "status": self.status or "completed", **call}


class FunctionOutputItem(Open):
    """The output of a function that the assistant called."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Parts
    id: str | None = None
    status: str | None = None

    @property
    def texts(self) -> list[str]:
        """See Item."""
        return [part.text for part in self.output]

    def as_json(self) -> dict[str, Any]:
        """See Item."""
        about = {"id": self.id or new_id("fco"), "type": self.type, "status": self.status or "completed"}
        if len(self.output) == 1:
            return {**about, "call_id": self.call_id, "output": self.output[0].text}
        parts = [{"type": "input_text", "text": text} for text in self.texts]
        return {**about, "call_id": self.call_id, "output": parts}


class ReasoningItem(Open):
    """The assistant's reasoning before what follows in the conversation."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Annotated[str | None, AfterValidator(_unencrypted)] = None
    id: str | None = None
    status: str | None = None

    @property
    def texts(self) -> list[str]:
        """See Item: of the reasoning itself, or where it is not there of its summary."""
        return [part.text for part in self.content or self.summary or ()]

    def as_json(self) -> dict[str, Any]:
        """See Item."""
        return {
            "id": self.id or new_id("rs"),
            "type": self.type,
            "status": self.status or "completed",
            "summary": [{"type": "summary_text", "text": part.text} for part in self.summary or ()],
            "content": [{"type": "reasoning_text", "text": part.text} for part in self.content or ()],
        }


def _kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"({kind or 'message'})"


def _supported_item(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict):
        raise PydanticCustomError("item_type", "An item must be an object.")
    if kind is not None and kind not in _ITEMS:
        raise PydanticCustomError("unsupported", "Items of type '{kind}' are not supported.", {"kind": str(kind)[:64]})
    return value


AnyItem = Annotated[
    Annotated[MessageItem, Tag("(message)")]
    | Annotated[FunctionCallItem, Tag("(function_call)")]
    | Annotated[FunctionOutputItem, Tag("(function_call_output)")]
    | Annotated[ReasoningItem, Tag("(reasoning)")],
    Discriminator(_kind),
    BeforeValidator(_supported_item),
]


def num_parts(items: Sequence[Item]) -> int:
    """Returns the number of texts in the items: what it takes to go through them."""
    return sum(len(item.texts) for item in items)


def unknown_fields(items: Sequence[Item]) -> Iterator[str]:
    """Yields the paths of fields that nothing acts on: `input[0].name`."""
    for number, item in enumerate(items):
        yield from (f"input[{number}].{name}" for name in item.unknown_fields())
