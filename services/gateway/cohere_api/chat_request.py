"""Requests of /v2/chat, as typed values. What is inside of messages is checked when they become a chat's."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.api.requests.chat import MAX_DOCUMENTS, MAX_MESSAGES
from services.gateway.api.requests.earlier_calls import EarlierCalls
from services.gateway.api.requests.hints import Hinting
from services.gateway.api.requests.message_request import ThinkingBudget
from services.gateway.api.requests.schema import Penalty, Priority, Stops, TokenCount, TopK, whole
from services.gateway.api.requests.strict import Nested
from services.gateway.api.requests.tools import MAX_TOOLS, Function
from services.gateway.api.requests.validation import Neutral

_NO_CITATIONS = tuple({"mode": mode} for mode in ("OFF", "DISABLED"))
# Fields that Cohere's API knows and this server does not act on, with the values that ask for nothing.
CHAT_NEUTRAL: Neutral = {
    "citation_options": ({}, *_NO_CITATIONS),
    "raw_prompting": (False,),
    "safety_mode": ("CONTEXTUAL", "OFF"),  # Cohere's default, and none: no instruction is put into a prompt here
}


class Message(Nested):
    """One turn. tool_plan: what the assistant wrote before its calls. citations: of an answer of Cohere's own."""

    role: Literal["user", "assistant", "system", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: EarlierCalls | None = None
    tool_call_id: str | None = None
    tool_plan: str | None = None
    citations: Any = None

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        if self.citations:
            yield "citations"


class Tool(Nested):
    """A tool of the client's own."""

    type: Literal["function"]
    function: Function


class ResponseFormat(Nested):
    """The form of an answer: text, or an object, where there is a schema one that matches it."""

    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _schema_of_an_object(self) -> Self:
        if self.type == "text" and self.json_schema is not None:
            raise PydanticCustomError("json_schema_type", "'json_schema' goes with the type 'json_object'.")
        return self


class Thinking(Hinting, Nested):
    """The reasoning before an answer."""

    hints: ClassVar[frozenset[str]] = frozenset({"token_budget"})

    type: Literal["enabled", "disabled"]
    token_budget: ThinkingBudget | None = None


class CohereChatRequest(Hinting, Nested):
    """The body of /v2/chat."""

    hints: ClassVar[frozenset[str]] = frozenset({"thinking"})

    model: str | None = None  # None: the one that is served
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    stream: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    strict_tools: bool | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: Annotated[list[str | dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None
    response_format: ResponseFormat | None = None
    thinking: Thinking | None = None
    max_tokens: TokenCount | None = None
    stop_sequences: Stops | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), whole] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    k: TopK | None = None
    p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    logprobs: bool | None = None
    priority: Priority | None = None
