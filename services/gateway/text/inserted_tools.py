"""Tools for models whose chat template knows none: a text that describes them, and calls as parts of messages.

The form is that of Hermes, which many models have seen (https://github.com/NousResearch/Hermes-Function-Calling).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_INSTRUCTIONS = """\
You may call functions to help with the user's request. These are the functions, each as JSON:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments between <tool_call> tags:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>
Results come between <tool_response> tags. Call a function only where it helps; else just answer."""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Returns messages of roles that every template knows; the first one describes the tools, if there are any."""
    plain = [_without_tools(message) for message in messages]
    if not tools:
        return plain
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=described)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def as_users_turn(result: Mapping[str, Any]) -> Message:
    """Returns the result of a call as a turn of the user."""
    rest = {key: value for key, value in result.items() if key != "tool_call_id"}
    return {**rest, "role": "user", "content": f"<tool_response>\n{result['content']}\n</tool_response>"}


def _without_tools(message: Mapping[str, Any]) -> Message:
    rest = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return as_users_turn(rest)
    calls = [_written(call["function"]) for call in message.get("tool_calls", ())]
    if not calls:
        return rest
    return {**rest, "content": "\n".join([*filter(None, [message["content"]]), *calls])}


def _written(function: Mapping[str, Any]) -> str:
    written = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"
