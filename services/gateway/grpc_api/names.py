"""The names of fields in this API, where OpenAI's differ, and the fields that only a newer inference.proto has."""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from services.gateway.api.errors import ApiError

# OpenAI's name of a chat's field, and its name here.
_CHAT_NAMES = {
    "messages": "chat.messages",
    "chat_template_kwargs": "chat.template_kwargs",
    "documents": "chat.documents",
    "chat_template": "chat.chat_template",
    "add_generation_prompt": "chat.add_generation_prompt",
    "continue_final_message": "chat.continue_final_message",
    "tools": "chat.tools",
    "tool_choice": "chat.tool_choice",
    "parallel_tool_calls": "chat.parallel_tool_calls",
    "reasoning_effort": "chat.reasoning_effort",
    "thinking_token_budget": "chat.thinking_token_budget",
    "include_reasoning": "chat.include_reasoning",
    "top_logprobs": "logprobs",
}
_MOST_MESSAGES = 512  # of a request, in which unknown fields are looked for


def grpc_message(error: ApiError, request: Message) -> str:
    """The error's message, with the fields' names in this API."""
    if error.param is None:
        return error.message
    param = own_name(error.param, request)
    message = error.message.replace(f"'{error.param}'", f"'{param}'")
    return f"{param}: {message}"


def own_name(param: str, request: Message) -> str:
    """Returns the name in this API of a field of OpenAI's, which is a path: `tools[0].function.name`."""
    root = re.split(r"\W", param, maxsplit=1)[0]
    rest = param[len(root) :].replace(".function.", ".")  # tools and calls have its fields themselves
    return _names(request).get(root, root) + rest


def _names(request: Any) -> dict[str, str]:
    oneof = request.DESCRIPTOR.oneofs_by_name.get("prompt")
    which = None if oneof is None else request.WhichOneof("prompt")
    if which != "chat":
        return {"prompt": which or "prompt", "input": "inputs"}
    named = {"tool_choice": "chat.tool_name"} if request.chat.HasField("tool_name") else {}
    return {**_CHAT_NAMES, **named}


def unknown_fields(request: Message) -> Iterator[str]:
    """Yields the paths of fields that are not in this inference.proto: `chat.messages[0].field 9`."""
    for path, message in islice(_messages(request, ""), _MOST_MESSAGES):
        unknown: Any = UnknownFieldSet(message)  # its stub knows no iteration
        yield from (f"{path}field {field.field_number}" for field in unknown)


def _messages(message: Message, path: str) -> Iterator[tuple[str, Message]]:
    """Yields a message and those in its fields, with the paths before the names of their fields. Maps are left out."""
    yield path, message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if not field.is_repeated:
            yield from _messages(value, f"{path}{field.name}.")
            continue
        for number, each in enumerate(value):
            yield from _messages(each, f"{path}{field.name}[{number}].")
