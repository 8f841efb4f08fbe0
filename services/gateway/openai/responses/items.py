"""The items of a conversation: what a request sends, and what an answer has and a client sends back."""

import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Protocol

import orjson
from pydantic import BeforeValidator, Field, WithJsonSchema

from services.gateway.api.requests.strict import Open
from services.gateway.openai.responses.parts import AnyPart, OutputParts, Parts, TextPart, Texts, unknown_part_fields
from services.gateway.openai.responses.tools import Tools, unknown_tool_fields

MAX_ITEMS = 2048  # of a conversation, as many as a chat may have messages

_RESPONSE = "resp_"
_OF_OUTPUT = re.compile(r"[a-z]{1,8}_([0-9a-f]{32})[0-9a-f]{4,8}")

Role = Literal["user", "assistant", "system", "developer"]


def new_id(prefix: str) -> str:
    """Returns a new id of an item: `msg_` and 32 hexadecimal digits, or another prefix."""
    return f"{prefix}_{secrets.token_hex(16)}"


def output_item_id(prefix: str, response_id: str, index: int) -> str:
    """Returns the id of an item of a response's output, which says where the item is found."""
    return f"{prefix}_{response_id.removeprefix(_RESPONSE)}{index:04x}"


def response_with_item(item_id: str) -> str | None:
    """Returns the id of the response whose output has an item; None: the item's id is none of ours."""
    found = _OF_OUTPUT.fullmatch(item_id)
    return None if found is None else f"{_RESPONSE}{found[1]}"


def _as_id(value: object) -> object:
    return str(value) if type(value) in (int, float) else value


def _as_arguments(value: object) -> object:
    """Takes arguments that a program has read, too; what a model wrote need not be JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return orjson.dumps(value).decode()


Id = Annotated[str, BeforeValidator(_as_id)]
_Written = Annotated[str, BeforeValidator(_as_arguments, json_schema_input_type=Any)]


class Item(Protocol):
    """An item of a conversation."""

    @property
    def id(self) -> str | None:
        """The id that its sender gave it, or its response; None: none."""

    @property
    def texts(self) -> list[str]:
        """The texts of its parts; of a call, what it is called with."""

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""

    def as_json(self) -> dict[str, Any]:
        """Returns the item as answers list it, with an id."""


class _Item(Open):
    """The fields of every item of a conversation."""

    id: Id | None = None
    status: str | None = None

    def about(self, prefix: str, type: str) -> dict[str, Any]:
        """Returns what answers say of every item."""
        return {"id": self.id or new_id(prefix), "type": type, "status": self.status or "completed"}


class MessageItem(_Item):
    """A message of the user, the developer or the system."""

    type: Literal["message"] = "message"
    role: Annotated[Role, WithJsonSchema({"enum": ["user", "system", "developer"]})]
    content: Texts

    @property
    def texts(self) -> list[str]:
        """See Item."""
        return [part.text for part in self.content]

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        yield from unknown_part_fields(self.content, "content")

    def as_json(self) -> dict[str, Any]:
        """See Item."""
        content = [self._part(part) for part in self.content]
        return {**self.about("msg", self.type), "role": self.role, "content": content}

    def _part(self, part: AnyPart) -> dict[str, Any]:
        return {"type": "input_text", "text": part.text}


class AnswerItem(MessageItem):
    """A message of the assistant."""

    role: Annotated[Role, WithJsonSchema({"const": "assistant"})]
    content: Parts

    def _part(self, part: AnyPart) -> dict[str, Any]:
        notes = (part.annotations, part.logprobs) if isinstance(part, TextPart) else (None, None)
        about = {"annotations": notes[0] or [], "logprobs": notes[1] or []}
        return {"type": "output_text", "text": part.text, **about}


class CallItem(_Item):
    """A call by the assistant. namespace: that the tool is in."""

    call_id: Id
    name: Annotated[str, Field(min_length=1)]
    namespace: str | None = None

    @property
    def called(self) -> dict[str, Any]:
        """The fields of every call in answers."""
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        return {"call_id": self.call_id, **namespace, "name": self.name}


class FunctionCallItem(CallItem):
    """A call of a function. `arguments` is JSON, unless the model wrote something else."""

    type: Literal["function_call"]
    arguments: _Written

    @property
    def texts(self) -> list[str]:
        """See Item."""
        return [self.arguments]

    def as_json(self) -> dict[str, Any]:
        """See Item."""
        return {**self.about("fc", self.type), **self.called, "arguments": self.arguments}


class CustomCallItem(CallItem):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    input: _Written

    @property
    def texts(self) -> list[str]:
        """See Item."""
        return [self.input]

    def as_json(self) -> dict[str, Any]:
        """See Item."""
        return {**self.about("ctc", self.type), **self.called, "input": self.input}


class CallOutputItem(_Item):
    """The output of what the assistant called."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Id
    output: OutputParts

    @property
    def texts(self) -> list[str]:
        """See Item."""
        return [part.text for part in self.output]

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        yield from unknown_part_fields(self.output, "output")

    def as_json(self) -> dict[str, Any]:
        """See Item."""
        texts = self.texts
        output = [{"type": "input_text", "text": text} for text in texts]
        about = self.about("fco" if self.type == "function_call_output" else "ctco", self.type)
        return {**about, "call_id": self.call_id, "output": texts[0] if len(texts) == 1 else output}


class ReasoningText(Open):
    """A text of a reasoning item."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(_Item):
    """The assistant's reasoning before what follows in the conversation."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Any = None

    @property
    def texts(self) -> list[str]:
        """See Item: of the reasoning itself, or where it is not there of its summary."""
        return [part.text for part in self.content or self.summary or ()]

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        if self.encrypted_content is not None:
            yield "encrypted_content"

    def as_json(self) -> dict[str, Any]:
        """See Item."""
        return {
            **self.about("rs", self.type),
            "summary": [{"type": "summary_text", "text": part.text} for part in self.summary or ()],
            "content": [{"type": "reasoning_text", "text": part.text} for part in self.content or ()],
        }


class ToolsItem(_Item):
    """Tools that the model is offered beside those of the request."""

    type: Literal["additional_tools"]
    role: str | None = None
    tools: Tools

    @property
    def texts(self) -> list[str]:
        """See Item."""
        return []

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        yield from unknown_tool_fields(self.tools)

    def as_json(self) -> dict[str, Any]:
        """See Item."""
        listed = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return {**self.about("at", self.type), "role": "developer", "tools": listed}


def num_parts(items: Sequence[Item]) -> int:
    """Returns the number of texts in the items: what it takes to go through them."""
    return sum(len(item.texts) for item in items)
