"""Translates chats of gRPC requests to the fields of OpenAI's: messages, tools, reasoning, the template's variables."""

from typing import Any

import orjson
from google.protobuf.json_format import Error as JsonFormatError
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from protos import inference_pb2
from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.requests.tools import CHOICES
from services.gateway.api.requests.validation import read_value

# Fields that have their OpenAI name and are absent where the client did not set them.
_OPTIONAL = ("add_generation_prompt", "parallel_tool_calls", "thinking_token_budget", "include_reasoning")
# Likewise, and empty or false where the client did not set them.
_PLAIN = ("continue_final_message", "chat_template", "reasoning_effort")


def chat_fields(chat: inference_pb2.Chat) -> dict[str, Any]:
    """The fields of a chat. Raises ApiError."""
    fields: dict[str, Any] = {name: getattr(chat, name) for name in _OPTIONAL if chat.HasField(name)}
    fields |= {name: getattr(chat, name) or None for name in _PLAIN}
    fields["messages"] = [_message(message) for message in chat.messages]
    if chat.HasField("template_kwargs"):
        fields["chat_template_kwargs"] = _values(chat.template_kwargs, "chat_template_kwargs")
    if chat.documents:
        fields["documents"] = [_values(document, "documents") for document in chat.documents]
    if chat.tools:
        fields["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(chat.tools)]
    if chat.WhichOneof("chosen_tool") is not None:
        fields["tool_choice"] = _tool_choice(chat)
    return fields


def _message(message: inference_pb2.Message) -> dict[str, Any]:
    """A message. Its reasoning has both names, since templates read the one or the other."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.HasField("name"):
        fields["name"] = message.name
    if message.tool_calls:
        fields["tool_calls"] = [_call(call) for call in message.tool_calls]
    if tool_call_id := message.tool_call_id:
        fields["tool_call_id"] = tool_call_id
    if reasoning := message.reasoning:
        fields["reasoning_content"] = fields["reasoning"] = reasoning
    return fields


def _call(call: inference_pb2.ToolCall) -> dict[str, Any]:
    return {"id": call.id or None, "function": {"name": call.name, "arguments": call.arguments}}


def _tool(tool: inference_pb2.Tool, path: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if description := tool.description:
        function["description"] = description
    if parameters := tool.parameters:
        function["parameters"] = _schema(parameters, f"{path}.function.parameters")
    if tool.HasField("strict"):
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _schema(text: str, param: str) -> Any:
    try:
        return read_value(text.encode())
    except (orjson.JSONDecodeError, ApiError) as error:
        raise invalid(f"Invalid '{param}': it is not valid JSON, or it is nested too deeply.", param) from error


def _tool_choice(chat: inference_pb2.Chat) -> str | dict[str, Any]:
    if chat.HasField("tool_name"):
        return {"type": "function", "function": {"name": chat.tool_name}}
    if chat.tool_choice not in CHOICES:
        words = f"it must be one of {', '.join(CHOICES)}. A tool that must be called goes into 'tool_name'."
        raise invalid(f"Invalid 'tool_choice': {words}", "tool_choice", "invalid_value")
    return chat.tool_choice


def _values(struct: Message, param: str) -> dict[str, Any]:
    """The values of a Struct. Raises ApiError where JSON has none of them. param: the field, by OpenAI's name."""
    try:
        values: dict[str, Any] = MessageToDict(struct)
    except (ValueError, JsonFormatError) as error:  # NaN, an infinity
        raise invalid(f"Invalid '{param}': it has a number that is not finite.", param) from error
    return values
