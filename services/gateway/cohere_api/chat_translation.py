"""Translates requests of /v2/chat to the fields of chats, so that both have one set of rules.

A pure function of values: `chat_fields` returns JSON, which is checked as any chat is.
"""

from typing import Any

import orjson

from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.requests.earlier_calls import CalledFunction, EarlierCall
from services.gateway.cohere_api.chat_request import CohereChatRequest, Message, ResponseFormat, Thinking, Tool

_CHOICES = {"REQUIRED": "required", "NONE": "none"}
_SAME_NAME = (
    *("model", "stream", "max_tokens", "temperature", "seed", "frequency_penalty", "presence_penalty", "logprobs"),
    "priority",
)


class CohereChat(ChatRequest):
    """A chat that came by Cohere's API, which cuts the number of tokens that are asked for to what there is."""

    @property
    def clamps_tokens(self) -> bool:
        """See CommonRequest."""
        return True


def chat_fields(request: CohereChatRequest) -> dict[str, Any]:
    """Returns the fields of the chat that a request asks for, as JSON values; absent where it does not say."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAME_NAME}
    fields["messages"] = [_message(message) for message in request.messages]
    fields |= {"top_k": request.k, "top_p": request.p, "stop": request.stop_sequences}
    if request.tools:
        fields["tools"] = [_tool(tool, bool(request.strict_tools)) for tool in request.tools]
    if request.tool_choice is not None:
        fields["tool_choice"] = _CHOICES[request.tool_choice]
    if request.documents is not None:
        fields["documents"] = [_document(document) for document in request.documents]
    if request.response_format is not None:
        fields["response_format"] = _form(request.response_format)
    if request.thinking is not None:
        fields |= _thinking(request.thinking)
    return {name: value for name, value in fields.items() if value is not None}


def _message(message: Message) -> dict[str, Any]:
    """The parts of a content keep their form: chats read text and thinking as they come."""
    content = message.content
    if message.role == "tool" and isinstance(content, list):
        content = [_result_part(part) for part in content]
    if message.tool_plan:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
        content = [{"type": "text", "text": message.tool_plan}, *parts]
    made: dict[str, Any] = {"role": message.role, "content": content, "tool_call_id": message.tool_call_id}
    if message.tool_calls is not None:
        made["tool_calls"] = [_call(call) for call in message.tool_calls]
    return {name: value for name, value in made.items() if value is not None}


def _call(call: EarlierCall) -> dict[str, Any]:
    function = call.function or CalledFunction()
    return {"id": call.id, "type": "function", "function": {"name": function.name, "arguments": function.arguments}}


def _result_part(part: dict[str, Any]) -> dict[str, Any]:
    """A document in the result of a tool is its data, as JSON."""
    document = part.get("document")
    if part.get("type") != "document" or not isinstance(document, dict):
        return part
    return {"type": "text", "text": orjson.dumps(document.get("data", document)).decode()}


def _tool(tool: Tool, strict: bool) -> dict[str, Any]:
    function = {name: getattr(tool.function, name) for name in ("name", "description", "parameters", "strict")}
    if strict:
        function["strict"] = True
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _document(document: str | dict[str, Any]) -> dict[str, Any]:
    """A document as chat templates know it: what it says of itself, side by side."""
    if isinstance(document, str):
        return {"text": document}
    data = document.get("data")
    if not isinstance(data, dict):
        return {"text": data, **document} if isinstance(data, str) else document
    return {**data, "id": document["id"]} if "id" in document else data


def _form(form: ResponseFormat) -> dict[str, Any]:
    if form.json_schema is None:
        return {"type": form.type}
    schema = {"name": "answer", "schema": form.json_schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _thinking(thinking: Thinking) -> dict[str, Any]:
    if thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    # Templates of models that can do both read this variable.
    return {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": thinking.token_budget}
