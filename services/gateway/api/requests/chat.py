"""The fields of chats: requests of messages."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from services.gateway.api.errors import invalid
from services.gateway.api.requests.content_parts import (
    ROLES_READ_AS_TEXT,
    ContentPart,
    ThinkingPart,
    as_answers,
    as_text,
)
from services.gateway.api.requests.earlier_calls import CalledFunction, CallId, EarlierCall, EarlierCalls
from services.gateway.api.requests.hints import LEFT_OUT
from services.gateway.api.requests.message_request import MessageRequest
from services.gateway.api.requests.schema import AnswerTokens, TopOrAll
from services.gateway.api.requests.strict import Open

MAX_MESSAGES = 2048  # as OpenAI has it

MAX_DOCUMENTS = 1024
MAX_TEMPLATE_CHARS = 1 << 16


def _as_parts(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        role = info.data.get("role")
        as_read = as_answers if role == "assistant" else as_text
        return [*map(as_read, value)] if role in ROLES_READ_AS_TEXT else value
    if value is None:
        return value
    raise PydanticCustomError("content_type", "It must be a string or a list of content parts.")


Parts = Annotated[list[ContentPart], Field(fail_fast=True)]
_ContentJson = str | Parts | None  # as it comes


# A text; what is none is left out and named. The validator of hints would cost each message two microseconds.
_Thoughts = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}, {**LEFT_OUT}]})]


class Message(Open):
    """One message of a chat. The model's template decides which roles there are; it calls `developer` `system`."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[Parts | None, BeforeValidator(_as_parts, json_schema_input_type=_ContentJson)] = None
    tool_calls: EarlierCalls | None = None
    tool_call_id: CallId = None
    name: str | None = None
    reasoning_content: _Thoughts = None
    reasoning: _Thoughts = None
    # Fields that an assistant's answer has when a client sends it back.
    refusal: str | None = None
    audio: Any = None
    function_call: CalledFunction | None = None
    annotations: Any = None

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        if self.audio is not None:
            yield "audio"
        for name in ("reasoning", "reasoning_content"):
            if (value := getattr(self, name)) is not None and not isinstance(value, str):
                yield name
        for number, part in enumerate(self.content or ()):
            yield from (f"content[{number}].{name}" for name in part.unknown_fields())
        for number, call in enumerate(self.tool_calls or ()):
            yield from (f"tool_calls[{number}].{name}" for name in call.unknown_fields())

    @property
    def text(self) -> str:
        """The content's parts, joined by line breaks; where there are none, the refusal."""
        texts = [part.text or "" for part in self.content or () if not isinstance(part, ThinkingPart)]
        return "\n".join(texts) or self.refusal or ""

    @property
    def thoughts(self) -> dict[str, str]:
        """The reasoning before an earlier answer, by the field that has it."""
        named = {"reasoning_content": self.reasoning_content, "reasoning": self.reasoning}
        if found := {name: value for name, value in named.items() if isinstance(value, str)}:
            return found
        texts = [part.text for part in self.content or () if isinstance(part, ThinkingPart) and part.text]
        return {"reasoning_content": "\n".join(texts)} if texts else {}

    @property
    def calls(self) -> Sequence[EarlierCall]:
        """The calls of tools, by whichever field."""
        calls = self.tool_calls or ()
        return calls if self.function_call is None else (*calls, EarlierCall(function=self.function_call))


class ChatRequest(MessageRequest):
    """A chat: messages, of which the assistant's next one is wanted."""

    prompt_param: ClassVar[str] = "messages"
    top_params: ClassVar[tuple[str, ...]] = ("top_logprobs", "prompt_logprobs")

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: AnswerTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopOrAll | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None
    chat_template: Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE_CHARS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        for number, message in enumerate(self.messages):
            yield from (f"messages[{number}].{name}" for name in message.unknown_fields())

    @property
    def asked_tokens(self) -> int | None:
        """See CommonRequest."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def count_param(self) -> str:
        """See CommonRequest."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def default_tokens(self, room: int) -> int:
        """See CommonRequest: an answer may fill the context."""
        return room

    @property
    def num_logprobs(self) -> int | None:
        """See CommonRequest."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_combinations(self) -> None:
        """See CommonRequest."""
        super().check_combinations()
        if self.top_logprobs and not self.logprobs:
            raise invalid("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise invalid("'max_tokens' and 'max_completion_tokens' differ; send one of them.", "max_tokens")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise invalid("It cannot be combined with 'add_generation_prompt'.", "continue_final_message")
            if self.messages[-1].role != "assistant":
                raise invalid("The last message must be the assistant's to be continued.", "continue_final_message")
