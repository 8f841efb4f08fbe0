"""Answers and events of Cohere's API as they are described in /openapi.json, field by field."""

from typing import Literal

from pydantic import ConfigDict, Field, RootModel

from services.gateway.http.operation import Described

FinishReason = Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL"]


class CohereError(Described):
    """The error. The message names the field at fault, where there is one. `id` is the request's."""

    id: str
    message: str


class CohereText(Described):
    """Text."""

    type: Literal["text"]
    text: str


class CohereThinking(Described):
    """The model's reasoning."""

    type: Literal["thinking"]
    thinking: str


class CohereFunction(Described):
    """A function that is called, with its arguments as JSON."""

    name: str
    arguments: str


class CohereCall(Described):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CohereFunction


class CohereMessage(Described):
    """The assistant's message."""

    role: Literal["assistant"]
    content: list[CohereText | CohereThinking] | None = None
    tool_calls: list[CohereCall] | None = None


class Units(Described):
    """Numbers of tokens."""

    input_tokens: int
    output_tokens: int


class CohereUsage(Described):
    """The tokens of a chat. Nobody bills; units are tokens."""

    billed_units: Units
    tokens: Units
    cached_tokens: int


class LogprobItem(Described):
    """The tokens of a piece of text, and the logprob of each."""

    text: str
    token_ids: list[int]
    logprobs: list[float]


class CohereChatAnswer(Described):
    """The answer to a chat."""

    id: str
    finish_reason: FinishReason
    message: CohereMessage
    usage: CohereUsage
    logprobs: list[LogprobItem] | None = None


class RoleDelta(Described):
    """The role of a message that has begun."""

    role: Literal["assistant"]


class MessageBegun(Described):
    """The message has begun."""

    message: RoleDelta


class CohereMessageStart(Described):
    """The message has begun."""

    type: Literal["message-start"]
    id: str
    delta: MessageBegun


class ContentBegun(Described):
    """A content that has begun, without text so far."""

    content: CohereText | CohereThinking


class ContentBegunDelta(Described):
    """A content that has begun."""

    message: ContentBegun


class ContentStart(Described):
    """A content has begun."""

    type: Literal["content-start"]
    index: int
    delta: ContentBegunDelta


class TextPiece(Described):
    """A further piece of a text."""

    text: str


class ThinkingPiece(Described):
    """A further piece of the reasoning."""

    thinking: str


class ContentGrown(Described):
    """A content that has grown."""

    content: TextPiece | ThinkingPiece


class ContentGrownDelta(Described):
    """A content that has grown."""

    message: ContentGrown


class ContentDelta(Described):
    """A content has grown."""

    type: Literal["content-delta"]
    index: int
    delta: ContentGrownDelta
    logprobs: LogprobItem | None = None


class ContentEnd(Described):
    """A content is as it will stay."""

    type: Literal["content-end"]
    index: int


class CallBegun(Described):
    """A call that has begun, without arguments so far."""

    tool_calls: CohereCall


class CallBegunDelta(Described):
    """A call that has begun."""

    message: CallBegun


class ToolCallStart(Described):
    """A call has begun. Calls are numbered apart from contents."""

    type: Literal["tool-call-start"]
    index: int
    delta: CallBegunDelta


class ArgumentsPiece(Described):
    """A further piece of a call's arguments, which are JSON."""

    arguments: str


class CallPiece(Described):
    """A further piece of a call."""

    function: ArgumentsPiece


class CallGrown(Described):
    """A call that has grown."""

    tool_calls: CallPiece


class CallGrownDelta(Described):
    """A call that has grown."""

    message: CallGrown


class ToolCallDelta(Described):
    """A call has grown."""

    type: Literal["tool-call-delta"]
    index: int
    delta: CallGrownDelta


class ToolCallEnd(Described):
    """A call is as it will stay."""

    type: Literal["tool-call-end"]
    index: int


class MessageEnding(Described):
    """The reason for which the message ended, and the usage."""

    finish_reason: FinishReason
    usage: CohereUsage


class Failure(Described):
    """The error that ended the message."""

    finish_reason: Literal["ERROR"]
    error: str


class CohereMessageEnd(Described):
    """The message has ended."""

    type: Literal["message-end"]
    id: str
    delta: MessageEnding | Failure


class ChatEvent(
    RootModel[
        CohereMessageStart
        | ContentStart
        | ContentDelta
        | ContentEnd
        | ToolCallStart
        | ToolCallDelta
        | ToolCallEnd
        | CohereMessageEnd
    ]
):
    """An event of a chat's stream. `message-end` is the last one, also where an error ended it."""


class TypedEmbeddings(Described):
    """The vectors of all texts, in each type that was asked for."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    as_float: list[list[float]] | None = Field(None, alias="float")
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class ApiVersion(Described):
    """The version of Cohere's API."""

    version: Literal["2"]


class InputUnits(Described):
    """The number of tokens."""

    input_tokens: int


class EmbedMeta(Described):
    """The tokens of a request. Nobody bills; units are tokens."""

    api_version: ApiVersion
    billed_units: InputUnits
    tokens: InputUnits
    cached_tokens: int


class EmbedAnswer(Described):
    """The vectors of texts."""

    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: TypedEmbeddings
    texts: list[str]
    meta: EmbedMeta
