"""Histories with calls, in templates of the structure of several families: all is shown, and read again."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from services.gateway.text.call_habits import CallHabits, ShownCalls, ToolsAre
from services.gateway.text.called_histories import placed_tools, with_calls_shown
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.histories import fitted, with_results_in_order
from services.gateway.text.model_output.formats import TOOL_FORMS
from services.gateway.text.model_output.forms import find_forms
from services.gateway.text.model_output.written_calls import write_calls
from services.gateway.text.template_habits import Arguments
from tests.clients.families import TEMPLATES

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}},
}
HARD = {"town": 'Köln "x" <b>', "list": [1, {"deep": None}], "end": "<|end|>", "日本": True}

# As Granite 3's: any role and its text, and no word of calls.
GRANITE = (
    "{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }} Write <|tool_call|> and a list."
    "<|end_of_text|>\n{% endif %}"
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
# As SmolLM3's first: tools by another name, calls left out, results as the user's turns.
SMOLLM3 = (
    "<|im_start|>system\n{% if enable_thinking is defined and not enable_thinking %}/no_think{% endif %}"
    "{% if xml_tools %}<tools>{% for tool in xml_tools[:] %}{{ tool | string }}{% endfor %}</tools>"
    " <tool_call>\n{...}\n</tool_call>{% endif %}<|im_end|>\n"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content.lstrip('\n') }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# </think> tools #}"
)
# As Phi-4-mini's own: tools beside the system's text.
PHI4_MINI = (
    "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}"
    "{{ '<|system|>' + m['content'] + '<|tool|>' + m['tools'] + '<|/tool|><|end|>' }}{% else %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As Phi-4-mini's of vLLM: a text or calls, whose arguments are written as they come; results have another role.
FUNCTOOLS = (
    "<|system|>{% if tools %}functools[{{ tools | tojson }}]{% endif %}<|end|>"
    "{% for m in messages %}{% if m.role == 'tool' %}{% elif m.role != 'system' %}<|{{ m.role }}|>"
    "{% if m.content %}{{ m.content }}{% elif m.tool_calls %}{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}{% if not loop.last %},{% endif %}'
    "{% endfor %}{% endif %}<|end|>{% else %}<|system|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|assistant|>"
)
# As Llama 3's: one call of a message.
LLAMA3 = (
    "{{ tools }}{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('single tool-calls at once') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "({{ m.tool_calls[0].function | tojson }}){% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
# As DeepSeek-V3.1's: arguments are texts.
DEEPSEEK = (
    "{{ tools }}{% for m in messages %}{% if m.tool_calls %}<｜Assistant｜></think>{{ m.content }}"
    "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}"
    "{% endfor %}<｜tool▁calls▁end｜>{% elif m.role == 'tool' %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}<｜{{ m.role }}｜>{{ m.content }}{% endif %}{% endfor %}"
)
CHANNELS = (TEMPLATES / "channels.jinja").read_text()


@pytest.mark.parametrize(
    ("source", "habits"),
    [
        (GRANITE, CallHabits(ShownCalls.NONE)),
        (SMOLLM3, CallHabits(ShownCalls.NONE, ToolsAre.XML_TOOLS)),
        (PHI4_MINI, CallHabits(ShownCalls.NONE, ToolsAre.IN_SYSTEM)),
        (FUNCTOOLS, CallHabits(apart=True, no_results=True, no_lone_results=True)),
        (LLAMA3, CallHabits(ShownCalls.FIRST)),
        (DEEPSEEK, CallHabits()),
        (CHANNELS, CallHabits(ShownCalls.FIRST, one_text=True, no_lone_results=True)),
        ("{{ raise_exception('nothing at all') }}", CallHabits()),
        ("no message", CallHabits()),
    ],
)
def test_habits_are_found_by_probes(source: str, habits: CallHabits) -> None:
    assert ChatTemplate(source, {}).habits.called == habits


def test_arguments_that_a_template_would_write_as_python_does_are_texts() -> None:
    assert ChatTemplate(FUNCTOOLS, {}).habits.arguments is Arguments.TEXTS
    assert ChatTemplate(DEEPSEEK, {}).habits.arguments is Arguments.TEXTS


def call(own: str, arguments: Any) -> dict[str, Any]:
    return {"id": own, "type": "function", "function": {"name": "weather", "arguments": arguments}}


def result(own: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": own}


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "First?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Two towns.",
        "tool_calls": [call("a", HARD), call("b", {})],
    },
    result("b", "wet-b"),
    result("a", "dry-a"),
    {"role": "assistant", "content": "Said."},
    {"role": "user", "content": "Again?"},
    {"role": "assistant", "content": "", "tool_calls": [call("c", {"n": 2})]},
    result("c", "fine-c"),
]
LONE: list[dict[str, Any]] = [{"role": "user", "content": "First?"}, result("x", "lone-x")]


def rendered(source: str, messages: Sequence[dict[str, Any]]) -> str:
    template, form = ChatTemplate(source, {}), find_forms(None, source).form
    habits = template.habits
    shown = with_calls_shown(with_results_in_order(messages, 0), habits.called, form)
    placed, tools, variables = placed_tools(fitted(shown, habits), [TOOL], habits.called)
    return template.render(placed, tools=tools, kwargs=variables)


FAMILIES = [GRANITE, SMOLLM3, PHI4_MINI, FUNCTOOLS, LLAMA3, DEEPSEEK, CHANNELS]


@pytest.mark.parametrize("source", FAMILIES)
def test_all_of_a_history_is_shown_in_its_order(source: str) -> None:
    text = rendered(source, HISTORY)
    assert text.count('weather"') + text.count("weather<") + text.count("functions.weather") >= 3
    words = ("First?", "I look.", "Köln", "dry-a", "wet-b", "Said.", "Again?", "fine-c")
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    assert "lone-x" in rendered(source, LONE)


@pytest.mark.parametrize("source", [GRANITE, SMOLLM3, PHI4_MINI, DEEPSEEK])
def test_calls_that_were_shown_are_read_again(source: str) -> None:
    forms = find_forms(None, source)
    answer = forms.answer("", {"weather": {}})
    text = rendered(source, HISTORY)
    begin = text.index("I look.")
    end = min(
        text.index(mark, begin)
        for mark in ("<|end_of_text|>", "<|im_end|>", "<|end|><|tool|>", "<｜tool▁output▁b")
        if mark in text[begin:]
    )
    parts = [answer.feed(letter) for letter in text[begin:end]] + [answer.finish()]
    read = [part for each in parts for part in each.calls]
    written = ["".join(part.arguments for part in read if part.call == number) for number in range(2)]
    assert [json.loads(each) for each in written] == [HARD, {}]
    assert "".join(each.content for each in parts).strip() == "I look."


@pytest.mark.parametrize("form", [name for name in TOOL_FORMS if name not in ("pythonic", "qwen3-coder")])
@pytest.mark.parametrize("arguments", [HARD, {}, {"a": "```\n</tool_call>"}])
def test_calls_are_written_as_they_are_read(form: str, arguments: Any) -> None:
    spec = TOOL_FORMS[form].form
    assert spec is not None
    text = write_calls(spec, [("weather", arguments), ("f", {})])
    answer = find_forms(None, "{{ tools }}", form).answer("", {"weather": {}, "f": {}})
    read = [part for each in (answer.feed(text), answer.finish()) for part in each.calls]
    assert [part.name for part in read if part.name is not None] == ["weather", "f"]
    assert json.loads("".join(part.arguments for part in read if part.call == 0)) == arguments


def test_calls_are_written_in_python_and_between_tags() -> None:
    def read(form: str) -> list[Any]:
        spec = TOOL_FORMS[form].form
        assert spec is not None
        text = write_calls(spec, [("weather", {"town": "Köln", "days": 2})])
        answer = find_forms(None, "{{ tools }}", form).answer(
            "", {"weather": {"properties": {"days": {"type": "integer"}}}}
        )
        return [part for each in (answer.feed(text), answer.finish()) for part in each.calls]

    for form in ("pythonic", "qwen3-coder"):
        name, arguments = read(form)
        assert name.name == "weather"
        assert json.loads(arguments.arguments) == {"town": "Köln", "days": 2}


def test_a_text_beside_reasoning_and_calls_is_part_of_the_reasoning() -> None:
    text = rendered(CHANNELS, HISTORY)
    assert "<|channel|>analysis<|message|>Two towns.\n\nI look.<|end|>" in text
    assert text.count("<|start|>functions.weather to=assistant") == 3


def test_tools_are_placed_where_the_template_finds_them() -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    assert "'name': 'weather'" in rendered(SMOLLM3, messages)
    listed = '<|system|>Be short.<|tool|>[{"name":"weather"'
    assert listed in rendered(PHI4_MINI, messages)
    assert listed.replace("Be short.", "") in rendered(PHI4_MINI, messages[1:])
    assert placed_tools(messages, [], CallHabits(tools=ToolsAre.XML_TOOLS)) == (messages, [], {})
