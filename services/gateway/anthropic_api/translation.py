"""Translates requests of the Messages API to the fields of chats, so that both have one set of rules.

A pure function of values: `chat_fields` returns JSON, which is checked as any chat is.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import orjson

from services.gateway.anthropic_api.blocks import TextBlock, ThinkingBlock, ToolResultBlock, ToolUseBlock
from services.gateway.anthropic_api.request import CountRequest, MessagesRequest, Thinking, Tool, ToolChoice

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_ERROR_PREFIX = "Error: "  # chats have no other mark for a tool that failed
_SAME_NAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")


def chat_fields(request: CountRequest) -> dict[str, Any]:
    """Returns the fields of the chat that a request asks for, as JSON values; absent where it does not say."""
    fields: dict[str, Any] = {"model": request.model, "messages": _messages(request)}
    if request.messages[-1].role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.tools:
        fields["tools"] = [_tool(tool) for tool in request.tools]
    if request.tool_choice is not None:
        fields |= _tool_choice(request.tool_choice)
    if request.output_config is not None and request.output_config.effort is not None:
        fields["reasoning_effort"] = _EFFORTS[request.output_config.effort]
    if request.thinking is not None:
        fields |= _thinking(request.thinking)
    if request.form is not None:
        form = {"name": "answer", "schema": request.form.json_schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    if isinstance(request, MessagesRequest):
        fields |= {name: getattr(request, name) for name in _SAME_NAME}
        fields |= {"stop": request.stop_sequences, "user": request.metadata and request.metadata.user_id}
    return {name: value for name, value in fields.items() if value is not None}


def _messages(request: CountRequest) -> list[dict[str, Any]]:
    """Turns of one role that follow each other are one message, as Anthropic's API has it."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _texts(request.system)})
    for role, turns in groupby(request.messages, lambda message: message.role):
        blocks = [block for turn in turns for block in turn.content]
        if role == "assistant":
            messages.append(_answer(blocks))
        else:
            messages += _asked(role, blocks)
    return messages


def _asked(role: str, blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for are_results, part in groupby(blocks, lambda block: isinstance(block, ToolResultBlock)):
        if are_results:
            yield from map(_result, part)
        else:
            yield {"role": role, "content": _texts(list(part))}


def _answer(blocks: Sequence[Any]) -> dict[str, Any]:
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    reasoning = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    message: dict[str, Any] = {"role": "assistant"}
    if texts:
        message["content"] = _texts(texts)
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(blocks: Sequence[TextBlock]) -> list[dict[str, str]]:
    return [{"type": "text", "text": block.text} for block in blocks]


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": orjson.dumps(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: ToolResultBlock) -> dict[str, Any]:
    texts = _texts(block.content or [TextBlock(type="text", text="")])
    if block.is_error:
        texts[0]["text"] = _ERROR_PREFIX + texts[0]["text"]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": texts}


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
