"""Makes the chat that a request for a response asks for, and names the request's fields in what is wrong with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from services.gateway.api.errors import ApiError
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.requests.schema import CommonRequest
from services.gateway.api.requests.validation import validate_request
from services.gateway.openai.neutral import CHAT_NEUTRAL
from services.gateway.openai.responses.items import (
    AnswerItem,
    CallItem,
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    Item,
    MessageItem,
    ReasoningItem,
)
from services.gateway.openai.responses.offered_tools import OfferedTools, joined_name
from services.gateway.openai.responses.request import ResponsesRequest, TextFormat

# A chat's fields, as they are called here. Messages, which are numbered otherwise than items, are `input` as a whole.
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
# Common fields that the chat does not get as they are: of the stream, and those which are called otherwise.
_OWN = {"stream", "stream_options", "max_tokens", "response_format", "n"}

Message = dict[str, Any]


class ResponseChat(ChatRequest):
    """A chat whose prompt was made of items."""

    prompt_param: ClassVar[str] = "input"

    @property
    def clamps_tokens(self) -> bool:
        """See CommonRequest: agents ask for a constant number of tokens."""
        return True


def chat_of(request: ResponsesRequest, conversation: Sequence[Item], tools: OfferedTools) -> ResponseChat:
    """Returns the chat of a request whose conversation, earlier turns included, is this. Raises ApiError."""
    with in_words_of_responses(tools):
        return validate_request(chat_fields(request, conversation, tools), ResponseChat, CHAT_NEUTRAL)


def chat_fields(request: ResponsesRequest, conversation: Sequence[Item], tools: OfferedTools) -> dict[str, Any]:
    """Returns the chat's fields by name; a field that the request does not need is not there."""
    common = [name for name in CommonRequest.model_fields if name not in _OWN]
    fields = {name: getattr(request, name) for name in common}
    if request.num_logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": request.num_logprobs}
    fields |= {
        "messages": messages_of(conversation, request.instructions),
        "max_completion_tokens": request.asked_tokens,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "response_format": _response_format(request.text.format if request.text else None),
        **tools.chat_fields(),
    }
    return {name: value for name, value in fields.items() if value is not None}


def messages_of(items: Sequence[Item], instructions: str | None = None) -> list[Message]:
    """Returns the messages of a conversation.

    An assistant's reasoning, text and calls that follow each other are one message, as in a chat.
    """
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item:
            case AnswerItem():
                if "content" in (answer := _open_answer(messages)) or "tool_calls" in answer:
                    messages.append(answer := {"role": "assistant"})
                answer["content"] = _parts(item)
            case MessageItem():
                messages.append({"role": item.role, "content": _parts(item)})
            case ReasoningItem():
                messages.append({"role": "assistant", "reasoning_content": "\n".join(item.texts)})
            case CallItem():
                _open_answer(messages).setdefault("tool_calls", []).append(_call(item))
            case CallOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": "\n".join(item.texts)})
    return messages


def _open_answer(messages: list[Message]) -> Message:
    """Returns the last message where it is the assistant's, else a new one at the end."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _parts(item: MessageItem) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in item.texts or [""]]


def _call(item: CallItem) -> dict[str, Any]:
    name = joined_name(item.namespace, item.name)
    match item:
        case FunctionCallItem():
            called = {"type": "function", "function": {"name": name, "arguments": item.arguments}}
        case CustomCallItem():
            called = {"type": "custom", "custom": {"name": name, "input": item.input}}
    return {"id": item.call_id, **called}


def _response_format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    schema = {name: value for name, value in wanted.as_json().items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


@contextmanager
def in_words_of_responses(tools: OfferedTools) -> Iterator[None]:
    """Renames the fields that an ApiError of the `with` block names as a chat's."""
    try:
        yield
    except ApiError as error:
        path = error.param or ""
        here = own_name(path, tools)
        if here != path:
            error.message = error.message.replace(f"'{path}'", f"'{here}'")
            error.param = here
        raise


def own_name(path: str, tools: OfferedTools) -> str:
    """Returns the path that a field of the chat has in the request."""
    name, _, rest = path.partition(".")
    if name.startswith("messages"):
        return "input"
    if name.startswith("tools["):
        return tools.own_path(path)
    return path if name not in _NAMES else ".".join(filter(None, (_NAMES[name], rest)))
