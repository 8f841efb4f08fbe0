"""Responses, their items and their events as they are described in /openapi.json, field by field."""

from typing import Any, Literal

from pydantic import RootModel

from services.gateway.http.operation import Described
from services.gateway.openai.answer_models import TokenLogprob
from services.gateway.openai.responses.items import Role
from services.gateway.openai.responses.request import TextFormat
from services.gateway.openai.responses.tools import AllowedTool, AnyTool


class InputText(Described):
    """A text that the client sent."""

    type: Literal["input_text"]
    text: str


class OutputText(Described):
    """A text of the assistant. logprobs: a TokenLogprob each, or of an input what the client wrote."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(Described):
    """A text of the model's reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class Message(Described):
    """A message. status: `in_progress`, `completed` or `incomplete`, or of an input what the client wrote."""

    id: str
    type: Literal["message"]
    status: str
    role: Role
    content: list[InputText | OutputText]


class ReasoningItem(Described):
    """The model's reasoning."""

    id: str
    type: Literal["reasoning"]
    status: str
    summary: list[ReasoningText]
    content: list[ReasoningText]
    encrypted_content: None = None


class FunctionCall(Described):
    """A call of a function. arguments: JSON, as the model wrote it; namespace: that the function is in, if any."""

    id: str
    type: Literal["function_call"]
    status: str
    call_id: str
    namespace: str | None = None
    name: str
    arguments: str


class CustomToolCall(Described):
    """A call of a custom tool. input: text; namespace: see FunctionCall."""

    id: str
    type: Literal["custom_tool_call"]
    status: str
    call_id: str
    namespace: str | None = None
    name: str
    input: str


class ToolOutput(Described):
    """The output of a function or a custom tool, which the client sent."""

    id: str
    type: Literal["function_call_output", "custom_tool_call_output"]
    status: str
    call_id: str
    output: str | list[InputText]


class AdditionalTools(Described):
    """Tools that the client sent beside those of its request."""

    id: str
    type: Literal["additional_tools"]
    status: str
    role: Literal["developer"]
    tools: list[AnyTool]


OutputItem = Message | ReasoningItem | FunctionCall | CustomToolCall


class InputItemList(Described):
    """A page of the items that a response answers."""

    object: Literal["list"]
    data: list[OutputItem | ToolOutput | AdditionalTools]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseError(Described):
    """The error of a response that failed."""

    code: Literal["rate_limit_exceeded", "server_error"]
    message: str


class IncompleteDetails(Described):
    """The reason for which a response is not complete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Described):
    """The tokens of the prompt that a prefix cache had."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokensDetails(Described):
    """The tokens of the output that are the model's reasoning."""

    reasoning_tokens: int


class ResponseUsage(Described):
    """The tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseText(Described):
    """The form of a response's text."""

    format: TextFormat
    verbosity: Literal["medium"]


class ResponseReasoning(Described):
    """The reasoning that was asked for."""

    effort: str | None
    summary: None


class NamedTool(Described):
    """The tool that had to be called."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(Described):
    """The tools that could be called, or one of which had to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class Response(Described):
    """A response. What its request left open has the value that Baton uses."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    store: bool
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    text: ResponseText
    reasoning: ResponseReasoning
    tools: list[AnyTool]
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools
    parallel_tool_calls: bool
    truncation: Literal["auto", "disabled"]
    background: bool
    service_tier: Literal["default"]
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None


class DeletedResponse(Described):
    """The response is not kept any more."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseStep(Described):
    """The response has begun, or it has ended; cancelled ones end as incomplete ones do."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response
    sequence_number: int


class ItemStep(Described):
    """An item has begun, or is as it will stay."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem
    sequence_number: int


class PartStep(Described):
    """The one part of an item has begun, or is as it will stay."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText
    sequence_number: int


class TextDelta(Described):
    """A further piece of a text."""

    type: Literal["response.output_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]
    sequence_number: int


class TextDone(Described):
    """A whole text."""

    type: Literal["response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]
    sequence_number: int


class ReasoningDelta(Described):
    """A further piece of the reasoning."""

    type: Literal["response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    sequence_number: int


class ReasoningDone(Described):
    """The whole reasoning."""

    type: Literal["response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    sequence_number: int


class ArgumentsDelta(Described):
    """A further piece of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str
    sequence_number: int


class ArgumentsDone(Described):
    """The whole arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str
    sequence_number: int


class InputDelta(Described):
    """A further piece of a custom tool's input."""

    type: Literal["response.custom_tool_call_input.delta"]
    item_id: str
    output_index: int
    delta: str
    sequence_number: int


class InputDone(Described):
    """The whole input of a custom tool."""

    type: Literal["response.custom_tool_call_input.done"]
    item_id: str
    output_index: int
    input: str
    sequence_number: int


class ResponseEvent(
    RootModel[
        ResponseStep
        | ItemStep
        | PartStep
        | TextDelta
        | TextDone
        | ReasoningDelta
        | ReasoningDone
        | ArgumentsDelta
        | ArgumentsDone
        | InputDelta
        | InputDone
    ]
):
    """An event of a response's stream. `sequence_number` counts them."""
