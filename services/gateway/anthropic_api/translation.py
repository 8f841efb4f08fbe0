"""Translates requests of the Messages API to the fields of chats, so that both have one set of rules.

A pure function of values: `chat_fields` returns JSON, which is checked as any chat is.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count, groupby
from math import inf
from typing import Annotated, Any

import orjson
from pydantic import Field

from services.gateway.anthropic_api.blocks import MAX_BLOCKS, TextBlock, ThinkingBlock, ToolResultBlock, ToolUseBlock
from services.gateway.anthropic_api.other_blocks import OtherBlock
from services.gateway.anthropic_api.request import CountRequest, MessagesRequest, Thinking
from services.gateway.anthropic_api.tools import Tool, ToolChoice
from services.gateway.api.requests.chat import MAX_MESSAGES, ChatRequest
from services.gateway.api.requests.chat import Message as ChatMessage

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ERROR_PREFIX = "Error: "  # chats have no other mark for a tool that failed
_SAME_NAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")


class MessagesChat(ChatRequest):
    """A chat that came by the Messages API, whose clients ask for more tokens than any answer has.

    Each result in a message of the request is a message of its own.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES * MAX_BLOCKS, fail_fast=True)]

    @property
    def clamps_tokens(self) -> bool:
        """See CommonRequest."""
        return True


def chat_fields(request: CountRequest) -> dict[str, Any]:
    """Returns the fields of the chat that a request asks for, as JSON values; absent where it does not say."""
    fields: dict[str, Any] = {"model": request.model, "messages": list(_messages(request))}
    if request.goes_on:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.own_tools:
        fields["tools"] = [_tool(tool) for tool in request.own_tools]
        if request.tool_choice is not None:
            fields |= _tool_choice(request.tool_choice)
    if request.output_config is not None:
        fields["reasoning_effort"] = request.output_config.effort
    if request.thinking is not None:
        fields |= _thinking(request.thinking)
    if request.form is not None:
        form = {"name": "answer", "schema": request.form.json_schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    if isinstance(request, MessagesRequest):
        fields |= {name: getattr(request, name) for name in _SAME_NAME}
        fields |= {"stop": request.stop_sequences, "user": request.metadata and request.metadata.user_id}
        if (fields.get("thinking_token_budget") or 0) >= request.max_tokens - 1:
            fields["thinking_token_budget"] = None  # it leaves no room for an answer, so that it bounds nothing
    return {name: value for name, value in fields.items() if value is not None}


def _messages(request: CountRequest) -> Iterator[dict[str, Any]]:
    """Turns of one role that follow each other are one message, as Anthropic's API has it."""
    if request.system_texts:
        yield {"role": "system", "content": _texts(request.system_texts)}
    number, calls = count(), dict[str, int]()  # the number of each call so far, by its id
    for role, turns in groupby(request.messages, lambda message: message.role):
        blocks = [block for turn in turns for block in turn.blocks]
        if role == "assistant":
            calls |= {block.id: next(number) for block in blocks if isinstance(block, ToolUseBlock)}
            yield _answer(blocks)
        else:
            yield from _asked(role, blocks, calls)


def _asked(role: str, blocks: Sequence[Any], calls: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Results come first, in the order of their calls: templates know no other place for them."""
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    yield from map(_result, sorted(results, key=lambda block: calls.get(block.tool_use_id, inf)))
    texts = [block.text for block in blocks if isinstance(block, TextBlock) and block.text]
    if texts or (role == "user" and not results):
        yield {"role": role, "content": _texts(texts or [""])}


def _answer(blocks: Sequence[Any]) -> dict[str, Any]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock) and block.text]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    reasoning = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking)
    message: dict[str, Any] = {"role": "assistant"}
    if texts:
        message["content"] = _texts(texts)
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": orjson.dumps(_arguments(block.input)).decode()}
    return {"id": block.id or None, "type": "function", "function": function}


def _arguments(value: Any) -> dict[str, Any]:
    """Returns the input of a call as the object that templates go through; what is none comes under `value`."""
    if isinstance(value, str):
        with suppress(orjson.JSONDecodeError):
            value = orjson.loads(value or "{}")
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"value": value}


def _result(block: ToolResultBlock) -> dict[str, Any]:
    texts = [_result_text(part) for part in block.content] or [""]
    if block.is_error:
        texts[0] = _ERROR_PREFIX + texts[0]
    return {"role": "tool", "tool_call_id": block.tool_use_id or None, "content": _texts(texts)}


def _result_text(part: TextBlock | OtherBlock) -> str:
    if isinstance(part, TextBlock):
        return part.text or ""
    return part.placeholder if part.text is None else part.text


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    function |= {} if tool.description is None else {"description": tool.description}
    function |= {} if tool.strict is None else {"strict": tool.strict}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {"tool_choice": named if choice.type == "tool" else _CHOICES[choice.type]}
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _thinking(thinking: Thinking) -> dict[str, Any]:
    if thinking.type == "disabled":
        return {"reasoning_effort": "none"}  # whatever the effort is
    # Templates of models that can do both read this variable.
    return {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": thinking.budget_tokens}
