"""Histories of chats as templates take them: results beside their calls, and messages in the order of their roles.

A history never changes, so what a template refuses in one ends its conversation. Messages are dicts of plain JSON, with
texts as contents; none of them is changed, lists are new.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any

import orjson

from services.gateway.text.template_habits import Arguments, Habits

Message = Mapping[str, Any]

_FOLDED = "<system>\n{text}\n</system>"
_ANSWERED_BY = {"user": "assistant", "assistant": "user"}
_BETWEEN = "\n\n"  # texts that are joined
_TEXTS = frozenset({"content", "reasoning", "reasoning_content"})  # of a message


def with_results_in_order(messages: Sequence[Message], id_chars: int) -> list[Message]:
    """Returns the messages with an id in each call, and with the results of calls in the calls' order.

    id_chars: the ids' number of characters, letters and digits; 0: any. A result without an id is that of the next call
    without a result.
    """
    shown: list[Message] = []
    calls: list[str] = []  # ids of the last calls, without those that have results
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        if are_results:
            shown += _in_order(list(group), calls, id_chars)
            continue
        for message in group:
            if listed := message.get("tool_calls"):
                named = [_named(call, f"{len(shown)}-{number}", id_chars) for number, call in enumerate(listed)]
                message, calls = {**message, "tool_calls": named}, [call["id"] for call in named]
            shown.append(message)
    return shown


def _named(call: Mapping[str, Any], place: str, id_chars: int) -> dict[str, Any]:
    return {**call, "id": _id(call["id"], id_chars) if call.get("id") else _id(f"call-{place}", id_chars)}


def _id(given: str, num_chars: int) -> str:
    """Returns an id of so many letters and digits: the one given, or one that is made of it."""
    if not num_chars or (len(given) == num_chars and given.isalnum()):
        return given
    return blake2b(given.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()[:num_chars]


def _in_order(results: Sequence[Message], calls: list[str], id_chars: int) -> list[Message]:
    left, places, named = list(calls), {call: number for number, call in enumerate(calls)}, []
    for result in results:
        if result.get("tool_call_id"):
            own = _id(result["tool_call_id"], id_chars)
        else:
            own = left[0] if left else _id("call", id_chars)
        if own in left:
            left.remove(own)
        named.append({**result, "tool_call_id": own})
    calls[:] = left
    return sorted(named, key=lambda result: places.get(result["tool_call_id"], len(places)))


def fitted(messages: Sequence[Message], habits: Habits) -> Sequence[Message]:
    """Returns messages that a template with these habits takes, with the same texts in the same order."""
    shown = messages
    if habits.arguments is not Arguments.ANY:
        shown = [_with_arguments(message, habits.arguments) for message in shown]
    if habits.one_system or habits.system_first:
        shown = _folded(
            _joined(shown, ("system",)), keep_first=not habits.no_system, keep_later=not habits.system_first
        )
    return list(_alternating(_joined(shown, ("user", "assistant")))) if habits.alternates else shown


def _alternating(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields the messages, and a turn without text where two of the user, or two answers, have only calls between them.

    Templates that count turns leave out calls and their results. The first turn is the user's.
    """
    following = "user"
    for message in messages:
        role = message["role"]
        if role in _ANSWERED_BY and not message.get("tool_calls"):
            if role != following:
                yield {"role": following, "content": ""}
            following = _ANSWERED_BY[role]
        yield message


def _joined(messages: Sequence[Message], roles: Sequence[str]) -> list[Message]:
    """Returns the messages with neighbours of one of these roles joined."""
    joined: list[Message] = []
    for role, group in groupby(messages, lambda message: message["role"]):
        turns = list(group)
        joined += [_as_one(turns)] if role in roles and len(turns) > 1 else turns
    return joined


def _as_one(turns: Sequence[Message]) -> dict[str, Any]:
    one = {name: value for turn in turns for name, value in turn.items()}
    for name in _TEXTS & one.keys():
        one[name] = _BETWEEN.join(turn[name] for turn in turns if turn.get(name))
    if "tool_calls" in one:
        one["tool_calls"] = [call for turn in turns for call in turn.get("tool_calls", ())]
    return one


def _folded(messages: Sequence[Message], *, keep_first: bool, keep_later: bool) -> list[Message]:
    """Returns the messages without those of the system that are not kept: their texts are in the next user's turn.

    Where an answer comes before that, or nothing, they are a user's turn of their own.
    """
    shown: list[Message] = []
    waiting: list[str] = []
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "system" and not (keep_later if number else keep_first):
            waiting.append(_FOLDED.format(text=message["content"]))
            continue
        if waiting and role == "user":
            message, waiting = {**message, "content": _BETWEEN.join([*waiting, message["content"]])}, []
        elif waiting and role == "assistant":
            shown.append({"role": "user", "content": _BETWEEN.join(waiting)})
            waiting = []
        shown.append(message)
    return [*shown, {"role": "user", "content": _BETWEEN.join(waiting)}] if waiting else shown


def _with_arguments(message: Message, wanted: Arguments) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if wanted is Arguments.OBJECTS and not isinstance(arguments, Mapping):
            arguments = {"arguments": arguments}
        elif wanted is Arguments.TEXTS and not isinstance(arguments, str):
            arguments = orjson.dumps(arguments).decode()
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}
