"""Messages and their events as they are described in /openapi.json, field by field."""

from typing import Any, Literal

from pydantic import RootModel

from services.gateway.http.operation import Described

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ThreadErrorDetails(Described):
    """The reason why the official clients send a conversation again, as a whole."""

    error_code: Literal["thread_unsupported_request"]
    unsupported: list[Literal["thread"]]


class MessagesErrorDetails(Described):
    """The error. The message begins with the field at fault, where there is one. details: where that is `thread`."""

    type: str
    message: str
    details: ThreadErrorDetails | None = None


class MessagesError(Described):
    """The envelope of every error of the Messages API."""

    type: Literal["error"]
    error: MessagesErrorDetails
    request_id: str


class TextContent(Described):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingContent(Described):
    """The model's reasoning. Signatures are the same for all."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(Described):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(Described):
    """The tokens of a message. Cached ones are not input tokens."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int


class AnswerMessage(Described):
    """The assistant's message. `stop_reason` is null where the message has just begun."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None
    usage: MessageUsage


class TokenCountAnswer(Described):
    """The tokens of a prompt."""

    input_tokens: int


class MessageStart(Described):
    """The message has begun."""

    type: Literal["message_start"]
    message: AnswerMessage


class Ping(Described):
    """A sign of life."""

    type: Literal["ping"]


class BlockStart(Described):
    """A content block has begun."""

    type: Literal["content_block_start"]
    index: int
    content_block: Content


class TextDelta(Described):
    """A further piece of a text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Described):
    """A further piece of the reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(Described):
    """The signature of the reasoning."""

    type: Literal["signature_delta"]
    signature: str


class InputDelta(Described):
    """A further piece of a call's input, which is JSON."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Described):
    """A block has grown."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Described):
    """A block is as it will stay."""

    type: Literal["content_block_stop"]
    index: int


class Ending(Described):
    """The reason for which a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Described):
    """The message is about to end."""

    type: Literal["message_delta"]
    delta: Ending
    usage: MessageUsage


class MessageStop(Described):
    """The message has ended."""

    type: Literal["message_stop"]


class MessageEvent(
    RootModel[MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessagesError]
):
    """An event of a message's stream. An error ends it."""
