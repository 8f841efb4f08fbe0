"""Makes the chat that a request for a response asks for, and names the request's fields in what is wrong with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from services.gateway.api.chat import ChatRequest
from services.gateway.api.errors import ApiError
from services.gateway.api.schema import CommonRequest
from services.gateway.api.validation import validate_request
from services.gateway.openai.neutral import CHAT_NEUTRAL
from services.gateway.openai.responses.items import (
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
)
from services.gateway.openai.responses.request import FunctionTool, ResponsesRequest, TextFormat, ToolChoice

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


def chat_of(request: ResponsesRequest, conversation: Sequence[Item]) -> ResponseChat:
    """Returns the chat of a request whose conversation, earlier turns included, is this. Raises ApiError."""
    with in_words_of_responses():
        return validate_request(chat_fields(request, conversation), ResponseChat, CHAT_NEUTRAL)


def chat_fields(request: ResponsesRequest, conversation: Sequence[Item]) -> dict[str, Any]:
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
        "tool_choice": _tool_choice(request.tool_choice),
        "tools": [_tool(tool) for tool in request.tools or ()] or None,
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
            case MessageItem(role="assistant"):
                if "content" in (answer := _open_answer(messages)) or "tool_calls" in answer:
                    messages.append(answer := {"role": "assistant"})
                answer["content"] = _parts(item)
            case MessageItem():
                messages.append({"role": item.role, "content": _parts(item)})
            case ReasoningItem():
                messages.append({"role": "assistant", "reasoning_content": "\n".join(item.texts)})
            case FunctionCallItem():
                _open_answer(messages).setdefault("tool_calls", []).append(_call(item))
            case FunctionOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": "\n".join(item.texts)})
    return messages


def _open_answer(messages: list[Message]) -> Message:
    """Returns the last message where it is the assistant's, else a new one at the end."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _parts(item: MessageItem) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in item.texts]


def _call(item: FunctionCallItem) -> dict[str, Any]:
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    about = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in about.items() if value is not None}}


def _tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None or choice.name is None:
        return None if choice is None else choice.type
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    schema = {name: value for name, value in wanted.as_json().items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


@contextmanager
def in_words_of_responses() -> Iterator[None]:
    """Renames the fields that an ApiError of the `with` block names as a chat's."""
    try:
        yield
    except ApiError as error:
        path = error.param or ""
        here = own_name(path)
        if here != path:
            error.message = error.message.replace(f"'{path}'", f"'{here}'")
            error.param = here
        raise


def own_name(path: str) -> str:
    """Returns the path that a field of the chat has in the request."""
    name, _, rest = path.partition(".")
    if name.startswith("messages"):
        return "input"
    if name.startswith("tools["):
        return f"{name}.{rest.removeprefix('function.')}" if rest else name
    return path if name not in _NAMES else ".".join(filter(None, (_NAMES[name], rest)))
