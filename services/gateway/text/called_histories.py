"""Histories with calls of tools, as templates take them that show only some of what a history has.

What a template refuses is put in another form, and what it drops in silence is written where it shows it. Messages are
dicts of plain JSON; none of them is changed, lists are new.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from services.gateway.text.call_habits import XML_TOOLS, CallHabits, ShownCalls, ToolsAre
from services.gateway.text.inserted_tools import as_users_turn
from services.gateway.text.model_output.formats import INSERTED, TOOL_FORMS, CallForm
from services.gateway.text.model_output.written_calls import write_calls

Message = Mapping[str, Any]
_BETWEEN = "\n\n"


def with_calls_shown(messages: Sequence[Message], habits: CallHabits, form: CallForm | None) -> Sequence[Message]:
    """Returns messages whose calls and results a template with these habits shows.

    The results of a message's calls follow it, in their order. form: in which the model writes calls; None: in that of
    Hermes, where a template shows none.
    """
    if habits == CallHabits(tools=habits.tools):
        return messages
    if habits.calls is ShownCalls.NONE:
        form = form or TOOL_FORMS[INSERTED].form
        assert form is not None
        messages = [_written(message, form) for message in messages]
        return [_result(message, shown=not habits.no_results) for message in messages]
    if habits.one_text:
        messages = [_with_one_text(message) for message in messages]
    if habits.apart:
        messages = [part for message in messages for part in _apart(message)]
    if habits.calls is ShownCalls.FIRST:
        messages = list(_one_by_one(messages))
    return list(_with_results_shown(messages, habits))


def _with_tools_in_system(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
    """Returns the messages with the tools as JSON beside the system's text, which is empty where there was none."""
    listed = orjson.dumps([tool["function"] for tool in tools]).decode()
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "tools": listed}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": listed}, *messages]


def placed_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], habits: CallHabits
) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """Returns the messages, the tools, and further variables, with the tools where the template finds them."""
    if not tools or habits.tools is ToolsAre.TOOLS:
        return messages, tools, {}
    if habits.tools is ToolsAre.XML_TOOLS:
        return messages, (), {XML_TOOLS: tools}
    return _with_tools_in_system(messages, tools), (), {}


def _written(message: Message, form: CallForm) -> Message:
    """Returns a message with its calls in its text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    text = write_calls(form, [(call["function"]["name"], call["function"]["arguments"]) for call in calls])
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, [message["content"], text]))}


def _with_one_text(message: Message) -> Message:
    """Returns a message with calls whose text is part of its reasoning, where it has both."""
    if not message.get("tool_calls") or not message["content"]:
        return message
    thoughts = next((message[key] for key in ("reasoning_content", "reasoning") if message.get(key)), None)
    if thoughts is None:
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning"}
    return {**rest, "content": "", "reasoning_content": _BETWEEN.join([thoughts, message["content"]])}


def _apart(message: Message) -> Iterator[Message]:
    """Yields the text of a message, and then its calls."""
    if not message.get("tool_calls") or not message["content"]:
        yield message
        return
    yield {key: value for key, value in message.items() if key != "tool_calls"}
    yield {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}


def _one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields the messages, and for each call one of its own, with its results after it."""
    position = 0
    while position < len(messages):
        message, position = messages[position], position + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        end = position
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results, position = list(messages[position:end]), end
        for number, call in enumerate(calls):
            yield {**(message if not number else {"role": message["role"], "content": ""}), "tool_calls": [call]}
            yield from (each for each in results if each.get("tool_call_id") == call.get("id"))
        known = {call.get("id") for call in calls}
        yield from (each for each in results if each.get("tool_call_id") not in known)


def _with_results_shown(messages: Sequence[Message], habits: CallHabits) -> Iterator[Message]:
    """Yields the messages, with results that the template refuses, or does not show, as the user's turns."""
    follows_call = False
    for message in messages:
        role = message["role"]
        if role != "tool":
            follows_call = bool(message.get("tool_calls"))
            yield message
            continue
        yield _result(message, shown=not habits.no_results and (follows_call or not habits.no_lone_results))


def _result(message: Message, *, shown: bool) -> Message:
    return message if shown or message["role"] != "tool" else as_users_turn(message)
