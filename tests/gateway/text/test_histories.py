"""Histories that chat templates refuse as they are, and take as they are fitted."""

import json
import time
from typing import Any

import pytest

from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.histories import fitted, with_results_in_order
from services.gateway.text.template_habits import Arguments, Habits

SAYS = (
    "{{ '[' + m.role + ']' + m.content }}{% for c in m.tool_calls or [] %}{{ '(' + c.function.name + ')' }}{% endfor %}"
)
PLAIN = "{% for m in messages %}" + SAYS + "{% endfor %}"
# As Qwen3.5's: one message of the system, the first.
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + SAYS + "{% endfor %}"
)
# As Mistral's: after that, turns of user and assistant that alternate, calls and their results aside.
ALTERNATES = (
    "{% if messages[0].role == 'system' %}{{ '[system]' + messages[0].content }}{% set loop_messages = messages[1:] %}"
    "{% else %}{% set loop_messages = messages %}{% endif %}{% set ns = namespace(index=0) %}"
    "{% for m in loop_messages %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}"
    "{% if m.role == 'system' %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}"
    + SAYS
    + "{% endfor %}"
)
# As Gemma's.
NONE = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + ALTERNATES

# As gpt-oss': it leaves messages of the system out but the first.
DROPS = "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + SAYS + "{% endif %}{% endfor %}"
# As Llama 3's: what follows the system's message shows the tools.
SHOWS_TOOLS = (
    "{% if tools and messages[0].role == 'system' and messages[1].role != 'user' %}"
    "{{ raise_exception('Cannot put tools in the first user message') }}{% endif %}" + PLAIN
)

OBJECTS = PLAIN.replace("c.function.name ", "c.function.name + (c.function.arguments | items | list | tojson) ")
METHODS = PLAIN.replace("c.function.name ", "c.function.name + (c.function.arguments.items() | list | string) ")
TEXTS = PLAIN.replace("c.function.name ", "c.function.name + c.function.arguments ")
JSON = PLAIN.replace("c.function.name ", "c.function.name + (c.function.arguments | tojson) ")


def chat(turns: str) -> list[dict[str, Any]]:
    """The messages of turns like `s:be short u:Hi a:Hello`."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns.split()]


@pytest.mark.parametrize(
    ("source", "habits"),
    [
        (PLAIN, Habits()),
        (FIRST, Habits(one_system=True, system_first=True)),
        (ALTERNATES, Habits(one_system=True, system_first=True, alternates=True)),
        (NONE, Habits(no_system=True, one_system=True, system_first=True, alternates=True)),
        (DROPS, Habits(one_system=True, system_first=True)),
        (SHOWS_TOOLS, Habits(one_system=True)),
        (OBJECTS, Habits(arguments=Arguments.OBJECTS)),
        (METHODS, Habits(arguments=Arguments.OBJECTS)),
        (TEXTS, Habits(arguments=Arguments.TEXTS)),
        (JSON, Habits()),
        ("{{ raise_exception('nothing at all') }}", Habits()),
        ("{{ messages[0].content.nothing.at_all }}", Habits()),
    ],
)
def test_habits_are_found_by_probes(source: str, habits: Habits) -> None:
    assert ChatTemplate(source, {}).habits == habits


@pytest.mark.parametrize(
    ("source", "turns", "text"),
    [
        (PLAIN, "s:1 s:2 u:3 s:4 u:5 u:6", "[system]1[system]2[user]3[system]4[user]5[user]6"),
        (FIRST, "s:1 s:2 u:3 u:4", "[system]1\n\n2[user]3[user]4"),
        (FIRST, "u:1 s:2 s:3 u:4", "[user]1[user]<system>\n2\n\n3\n</system>\n\n4"),
        (FIRST, "u:1 s:2 a:3 s:4", "[user]1[user]<system>\n2\n</system>[assistant]3[user]<system>\n4\n</system>"),
        (FIRST, "s:1 u:2 s:3 t:4 u:5", "[system]1[user]2[tool]4[user]<system>\n3\n</system>\n\n5"),
        (ALTERNATES, "s:1 u:2 u:3 a:4 a:5 u:6", "[system]1[user]2\n\n3[assistant]4\n\n5[user]6"),
        (ALTERNATES, "u:1 s:2 u:3", "[user]1\n\n<system>\n2\n</system>\n\n3"),
        (ALTERNATES, "a:1 u:2", "[user][assistant]1[user]2"),
        (NONE, "s:1 s:2 u:3 a:4 u:5", "[user]<system>\n1\n\n2\n</system>\n\n3[assistant]4[user]5"),
    ],
)
def test_messages_are_fitted_to_what_the_template_takes(source: str, turns: str, text: str) -> None:
    template = ChatTemplate(source, {})
    assert template.render(fitted(chat(turns), template.habits)) == text


def calling(*calls: tuple[str | None, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [call(*each) for each in calls]}


def call(own: str | None, arguments: Any) -> dict[str, Any]:
    named = {} if own is None else {"id": own}
    return {**named, "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize("arguments", [{"a": 1}, [1, 2], '{"a": ', "plain", 5])
@pytest.mark.parametrize("source", [OBJECTS, METHODS, TEXTS, JSON])
def test_arguments_of_any_form_are_shown(source: str, arguments: Any) -> None:
    template = ChatTemplate(source, {})
    text = template.render(fitted([*chat("u:1"), calling(("a", arguments))], template.habits))
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments)
    assert re_spaced(shown) in re_spaced(text)


def re_spaced(text: str) -> str:
    """Without what differs between ways to write JSON."""
    return "".join(each for each in text if each.isalnum())


def test_neighbours_that_are_joined_keep_their_calls() -> None:
    messages = [*chat("u:1"), calling(("a", {})), {**calling(("b", {})), "content": "2"}, *chat("u:3 u:4")]
    _, both, filler, last = fitted(messages, Habits(alternates=True))
    assert filler == {"role": "assistant", "content": ""}
    assert (both["content"], [each["id"] for each in both["tool_calls"]]) == ("2", ["a", "b"])
    assert last["content"] == "3\n\n4"


def test_turns_alternate_where_only_calls_are_between_them() -> None:
    template = ChatTemplate(ALTERNATES, {})
    messages = [*chat("u:1"), calling(("a", {})), {"role": "tool", "content": "2"}, *chat("u:3 a:4 u:5")]
    text = "[user]1[assistant](f)[tool]2[assistant][user]3[assistant]4[user]5"
    assert template.render(fitted(messages, template.habits)) == text


def result(own: str | None, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, **({} if own is None else {"tool_call_id": own})}


@pytest.mark.parametrize(
    ("results", "shown"),
    [
        ([("b", "2"), ("a", "1")], [("a", "1"), ("b", "2")]),
        ([(None, "1"), (None, "2")], [("a", "1"), ("b", "2")]),
        ([("b", "2"), (None, "1")], [("a", "1"), ("b", "2")]),
        ([("x", "3"), ("b", "2")], [("b", "2"), ("x", "3")]),
        ([("b", "2")], [("b", "2")]),
    ],
)
def test_results_are_in_the_order_of_their_calls(results: Any, shown: Any) -> None:
    messages = [*chat("u:1"), calling(("a", {}), ("b", {})), *(result(*each) for each in results), *chat("u:2")]
    ordered = with_results_in_order(messages, 0)
    assert [(each["tool_call_id"], each["content"]) for each in ordered[2:-1]] == shown
    assert ordered[-1] == messages[-1]


def test_ids_are_of_the_form_that_the_template_takes() -> None:
    messages = [
        calling(("toolu_01:x", {}), (None, {}), ("abcdefghi", {})),
        result(None, "2"),
        result("toolu_01:x", "1"),
    ]
    ordered = with_results_in_order(messages, 9)
    ids = [each["id"] for each in ordered[0]["tool_calls"]]
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert len(set(ids)) == 3
    assert ids[2] == "abcdefghi"
    assert ordered == with_results_in_order(messages, 9)


def test_turns_that_are_joined_keep_all_of_their_reasoning() -> None:
    turns = [{"role": "assistant", "content": f"a{n}", "reasoning_content": f"r{n}"} for n in range(2)]
    (_, joined) = fitted([*chat("u:x"), *turns], Habits(alternates=True))
    assert (joined["content"], joined["reasoning_content"]) == ("a0\n\na1", "r0\n\nr1")


def test_many_turns_of_one_role_are_joined_in_time_that_grows_with_their_text() -> None:
    """Of 8 MiB they took many seconds on the thread that all requests share."""
    turns = [{"role": role, "content": "x" * 4096} for role in ("system", "user") for _ in range(1024)]
    begun = time.process_time()
    shown = fitted(turns, Habits(no_system=True, one_system=True, system_first=True, alternates=True))
    assert time.process_time() - begun < 0.5
    assert len(shown) == 1
