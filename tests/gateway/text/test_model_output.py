"""What models write, told apart: golden outputs of each form, however they are cut, beside `transformers`' parser."""

import json
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from services.config import ReasoningParser, ToolParser
from services.gateway.text.model_output.answer import AnswerText
from services.gateway.text.model_output.formats import REASONING_FORMS, START_ANCHORS, TOOL_FORMS
from services.gateway.text.model_output.forms import HARMONY, NONE, find_forms
from services.gateway.text.model_output.parser import ParserTables
from services.gateway.text.model_output.template import TemplateSpecError, load_template

SCHEMAS: dict[str, Any] = {"f": {}, "g": {"properties": {"n": {"type": "integer"}, "b": {"type": ["boolean", "null"]}}}}
HARD = r'{"a": "x}\"]", "b": [1, {"c": null}], "größe": "日本 🙂"}'
Calls = list[tuple[str, str]]


@dataclass
class Parts:
    """All that was told apart."""

    content: str
    reasoning: str
    calls: Calls


def spec(tools: str | None = None, reasoning: str | None = "think") -> dict[str, Any]:
    fields: dict[str, Any] = {"content": {}}
    if reasoning is not None:
        fields["reasoning_content"] = REASONING_FORMS[reasoning].field
    if tools is not None:
        fields["tool_calls"] = TOOL_FORMS[tools].field
    return {"start_anchor": START_ANCHORS, "fields": fields}


def tables(tools: str | None = None, reasoning: str | None = "think") -> ParserTables:
    return ParserTables(load_template(spec(tools, reasoning)))


def told(tables: ParserTables, pieces: Iterable[str], begun: str = "") -> Parts:
    answer = AnswerText(tables, begun, SCHEMAS)
    parts, calls = Parts("", "", []), list[list[str]]()
    for each in [*map(answer.feed, pieces), answer.finish()]:
        parts.content += each.content
        parts.reasoning += each.reasoning
        for number, name, arguments in each.calls:
            if name is not None:
                assert (number, arguments) == (len(calls), "")
                calls.append([name, ""])
            calls[number][1] += arguments
    parts.calls = [(name, arguments) for name, arguments in calls]
    return parts


def cuts(text: str) -> Iterable[list[str]]:
    """The text in one piece, in characters, and cut at each character; and in pieces like those of tokens."""
    yield [text]
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    draw = random.Random(len(text))
    for _ in range(20):
        at, pieces = 0, list[str]()
        while at < len(text):
            pieces.append(text[at : at + draw.randint(1, 6)])
            at += len(pieces[-1])
        yield pieces


GOLDEN: list[tuple[str | None, str, str, str, Calls]] = [
    (None, "Just text, 1 < 2 and <b>.", "Just text, 1 < 2 and <b>.", "", []),
    (None, "<think>\nhm < x\n</think>\n\nYes \n", "Yes \n", "hm < x", []),
    (None, "Code:\n    x\n\n\t ", "Code:\n    x\n\n\t ", "", []),
    (None, " \n", " \n", "", []),
    (None, "<think>a</think>\n\n", "", "a", []),
    ("hermes", '\n<tool_call>{"name": "f"}</tool_call>\n', "", "", [("f", "{}")]),
    ("hermes", 'A \n<tool_call>{"name": "f"}</tool_call>\n', "A", "", [("f", "{}")]),
    ("hermes", 'A<tool_call>{"name": "f"}</tool_call>B \n', "AB \n", "", [("f", "{}")]),
    ("hermes", "No call. \n\n", "No call. \n\n", "", []),
    ("llama3-json", "No call.\n", "No call.\n", "", []),
    (None, "<think>cut off </thin", "", "cut off </thin", []),
    (None, " The mark <think> opens a thought.", " The mark <think> opens a thought.", "", []),
    (None, " \n<think>a</think> <think>b</think> B <think>", "B <think>", "ab", []),
    (
        "hermes",
        f'<think>a</think>Sure.\n<tool_call>\n{{"name": "f", "arguments": {HARD}}}\n</tool_call>\n'
        '<tool_call>{"arguments":{"n":2}, "id": 7, "x": [], "name": "g"}</tool_call>',
        "Sure.",
        "a",
        [("f", HARD), ("g", '{"n":2}')],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", "", [("f", "{}")]),
    ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', "", "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru', "", "", [("f", '{"a": tru')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> B', "B", "", [("f", '{"a": 1}')]),
    ("hermes", "A <tool_call>no JSON</tool_call> B", "A <tool_call>no JSON</tool_call> B", "", []),
    ("hermes", 'A <tool_call>{"name": 5}</tool_call>', 'A <tool_call>{"name": 5}</tool_call>', "", []),
    ("hermes", 'A <tool_call>{"name": "f", "argum', 'A <tool_call>{"name": "f", "argum', "", []),
    ("hermes", '<tool_call>{"name": 5', '<tool_call>{"name": 5', "", []),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call><tool_call>{"name": "g"}]</tool_call>',
        "",
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {"b": 2}}</tool_call><tool_call>{"name": "g"}',
        "",
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call><tool_call>{"name": "g"}</tool_call>',
        "",
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("hermes", r'<tool_call>{"name": "f\ud800"}</tool_call>', r'<tool_call>{"name": "f\ud800"}</tool_call>', "", []),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {HARD}, "id": "123456789"}}, {{"name": "g", "arguments": {{}}}}]',
        "",
        "",
        [("f", HARD), ("g", "{}")],
    ),
    ("mistral", "[TOOL_CALLS] no list", "[TOOL_CALLS] no list", "", []),
    (
        "mistral-args",
        'Hi[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]12a[ARGS]{"n": 2}',
        "Hi",
        "",
        [("f", '{"a": 1}'), ("g", '{"n": 2}')],
    ),
    (
        "llama3-json",
        f'<|python_tag|>{{"name": "f", "parameters": {HARD}}}; {{"type": "function", "name": "g", "parameters": {{}}}}',
        "",
        "",
        [("f", HARD), ("g", "{}")],
    ),
    ("llama3-json", '\n{"name": "f", "parameters": {}} and text', "and text", "", [("f", "{}")]),
    ("llama3-json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', "", []),
    ("llama3-json", '{"x": [1]}', '{"x": [1]}', "", []),
    ("llama3-json", 'Look: {"name": "f", "parameters": {}}', 'Look: {"name": "f", "parameters": {}}', "", []),
    (
        "pythonic",
        """[f(a=1, b="x)]", c=[True, None, {'k': -1.5}]), g(n=2)]""",
        "",
        "",
        [("f", '{"a": 1, "b": "x)]", "c": [true, null, {"k": -1.5}]}'), ("g", '{"n": 2}')],
    ),
    *(
        ("pythonic", f"[f(x={value})]", f"[f(x={value})]", "", Calls())
        for value in ("...", 'b"x"', "{1, 2}", "1j", "1e999", r'"\ud800"', "a.b")
    ),
    ("pythonic", "[f(true)]", "[f(true)]", "", []),
    ("pythonic", "[h(a=1)]", "[h(a=1)]", "", []),
    ("pythonic", "[1, 2]", "[1, 2]", "", []),
    ("pythonic", "[f(a=1), g(n=", ", g(n=", "", [("f", '{"a": 1}')]),
    *(
        (
            "qwen3-coder",
            f"<tool_call><function=g><parameter=n>{value}</parameter></function></tool_call>",
            "",
            "",
            [("g", json.dumps({"n": value}))],
        )
        for value in ("NaN", "Infinity", "1e999")
    ),
    (
        "qwen3-coder",
        "Ok\n<tool_call>\n<function=g>\n<parameter=n>\n12\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n"
        "<parameter=s>\na\nb\n</parameter>\n</function>\n</tool_call>",
        "Ok",
        "",
        [("g", '{"n": 12, "b": true, "s": "a\\nb"}')],
    ),
]


V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
LISTED = f'[{{"name": "f", "arguments": {HARD}}}, {{"name": "g", "arguments": {{}}}}]'
LISTED_CALLS = [("f", HARD), ("g", "{}")]

# Forms that other parsers do not know: those of Granite, Phi-4-mini and DeepSeek.
FURTHER: list[tuple[str | None, str, str, str, Calls]] = [
    ("granite", f"<|tool_call|>{LISTED}", "", "", LISTED_CALLS),
    ("granite", f"Sure. <|tool_call|> {LISTED}\nDone.", "Sure. \nDone.", "", LISTED_CALLS),
    ("granite", f"<tool_call>{LISTED}</tool_call> B", "B", "", LISTED_CALLS),
    ("granite", '<|tool_call|>{"name": "f"}<|tool_call|>', "<|tool_call|>", "", [("f", "{}")]),
    ("granite", "<|tool_call|>[]", "<|tool_call|>[]", "", []),
    ("granite", '<|tool_call|>["f"]', '<|tool_call|>["f"]', "", []),
    ("phi4-mini", f"<|tool_call|>{LISTED}<|/tool_call|>", "", "", LISTED_CALLS),
    (
        "phi4-mini",
        '<|tool_call|>{"name": "f", "arguments": {"a": "<|/tool_call|>"}}<|/tool_call|>\n'
        '<|tool_call|>{"name": "g"}<|/tool_call|> B',
        "B",
        "",
        [("f", '{"a": "<|/tool_call|>"}'), ("g", "{}")],
    ),
    ("phi4-mini", '<|tool_call|>[{"name": "f", "arguments": {"a": tru', "", "", [("f", '{"a": tru')]),
    ("functools", f"functools{LISTED}", "", "", LISTED_CALLS),
    ("functools", f"Ok.\n\nfunctools{LISTED} B", "Ok.\n\n B", "", LISTED_CALLS),
    ("functools", "import functools; functools[0]", "import functools; functools[0]", "", []),
    ("functools", "functools", "functools", "", []),
    (
        "deepseek-v3",
        f"<think>a</think>Ok.<｜tool▁calls▁begin｜>{V3.format('f', HARD)}\n{V3.format('g', '{}')}<｜tool▁calls▁end｜>",
        "Ok.",
        "a",
        LISTED_CALLS,
    ),
    ("deepseek-v3", V3.replace("json", "").format("web-search", '{"a": 1}'), "", "", [("web-search", '{"a": 1}')]),
    (
        "deepseek-v3",
        V3.format("f", '{"a": "```\\n<｜tool▁call▁end｜>"}') + " B",
        "B",
        "",
        [("f", '{"a": "```\\n<｜tool▁call▁end｜>"}')],
    ),
    ("deepseek-v3", "A <｜tool▁sep｜> B", "A <｜tool▁sep｜> B", "", []),
    (
        "deepseek-v31",
        f"Ok.<｜tool▁calls▁begin｜>{V31.format('f', HARD)}{V31.format('g', '{}')}<｜tool▁calls▁end｜>",
        "Ok.",
        "",
        LISTED_CALLS,
    ),
    ("deepseek-v31", V31.format("f", '{"a": "') + " B", "", "", [("f", '{"a": "<｜tool▁call▁end｜> B')]),
    ("deepseek-v31", "<｜tool▁call▁begin｜>f", "<｜tool▁call▁begin｜>f", "", []),
    ("deepseek-v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{", "", "", [("f", "{")]),
]


# Marks inside strings of calls, which the standard's own parser takes for ends.
STRINGS: list[tuple[str | None, str, str, str, Calls]] = [
    (
        "hermes",
        r'<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>\"</tool_call>\\"}}</tool_call>'
        '<tool_call>{"name": "g", "arguments": {"</tool_call>": "<tool_call>"}}</tool_call> B',
        "B",
        "",
        [("f", r'{"a": "x</tool_call>\"</tool_call>\\"}'), ("g", '{"</tool_call>": "<tool_call>"}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "x}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
        "",
        "",
        [("f", '{"a": "x}}\n'), ("g", "{}")],
    ),
    ("hermes", 'A <tool_call>no "JSON</tool_call> B', 'A <tool_call>no "JSON</tool_call> B', "", []),
    (
        "mistral-args",
        '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]g[ARGS]{}"}[TOOL_CALLS]g[ARGS]{"n": 2}',
        "",
        "",
        [("f", '{"a": "[TOOL_CALLS]g[ARGS]{}"}'), ("g", '{"n": 2}')],
    ),
    (
        "pythonic",
        """[f(a="<|python_end|>", b='"<|python_end|>')]<|python_end|>B""",
        "B",
        "",
        [("f", '{"a": "<|python_end|>", "b": "\\"<|python_end|>"}')],
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "reasoning", "calls"), [*GOLDEN, *FURTHER, *STRINGS])
def test_pieces_join_to_the_whole(form: str | None, text: str, content: str, reasoning: str, calls: Calls) -> None:
    shared = tables(form)
    for pieces in cuts(text):
        assert told(shared, pieces) == Parts(content, reasoning, calls), pieces


COMPARED = (None, "hermes", "mistral", "mistral-args")  # forms that have nothing of ours


def is_sound(text: str) -> bool:
    odd = ("no JSON", "no list", '"name": 5', "1}</tool_call>", "1}}}", "1}, ", "ud800", " <think>")
    return not any(each in text for each in odd) and not text.endswith(("tru", "argum"))


@pytest.mark.parametrize(
    ("form", "text"),
    [(form, text) for form, text, *_ in GOLDEN if form in COMPARED and is_sound(text)],
)
def test_the_standards_own_parser_agrees(form: str | None, text: str) -> None:
    """Arguments that it reads as a text are JSON here. It keeps the last of several texts that it may not join.

    It strips the content; here the white space at the answer's end stays.
    """
    written = spec(form)
    reasoning = written["fields"]["reasoning_content"]
    written["fields"]["reasoning_content"] = {key: value for key, value in reasoning.items() if key != "leads"}
    written["fields"]["content"] = {"repeats": True, "join": ""}
    expected = parse_response(text, written, prefix="")
    parts = told(tables(form), [text])
    assert parts.content.strip() == expected.get("content", "")
    assert parts.reasoning == expected.get("reasoning_content", "")
    listed = [call for each in expected.get("tool_calls", []) for call in (each if isinstance(each, list) else [each])]
    functions = [call["function"] for call in listed]
    assert [name for name, _ in parts.calls] == [each["name"] for each in functions]
    for (_, arguments), function in zip(parts.calls, functions, strict=True):
        theirs = function.get("arguments")
        assert json.loads(arguments) == (json.loads(theirs) if isinstance(theirs, str) else theirs or {})


OWN: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"<\|start\|>assistant",
    "fields": {
        "thinking": {"open": ["<|think|>", "<|think_more|>"], "close": "<|end|>", "repeats": True, "join": "\n"},
        "tool_calls": {
            "open_pattern": r"<call:(?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|stop|>"},
    },
}
OWN_KEYS: dict[str, Any] = {
    "start_anchor": "A:",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<<",
            "close": ">>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.tool}", "arguments": "{content.with.values}"},
            },
        },
    },
}
OWN_DIALECT: dict[str, Any] = {
    "start_anchor": "A:",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"call:(?P<name>\w+)(?=\{)",
            "close": ";;",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<"|', '|">']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
OWN_LINES: dict[str, Any] = {
    "start_anchor": "A:",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "BEGIN\n",
            "close": "END",
            "repeats": True,
            "content": "kv-lines",
            "transform": {"type": "function", "function": {"name": "lines", "arguments": "{content}"}},
        },
    },
}


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (OWN, "<|think|> a <|end|><call:f><x>1</x><y>two words</y></call><|stop|>"),
        (OWN, "<|think_more|>b<|end|>So: <call:g></call>"),
        (OWN_KEYS, 'Text <<{"tool": "f", "with": {"more": [1], "values": {"a": [1, "]"]}}}>>'),
        (OWN_DIALECT, 'call:f{a:<"|x:{y|">,b:[1,2]};;'),
        (OWN_LINES, "BEGIN\na: 1\nb : two: three\nEND"),
    ],
)
def test_templates_of_models_are_followed(own: dict[str, Any], text: str) -> None:
    expected = parse_response(text, own, prefix="")
    shared = ParserTables(load_template(own))
    for pieces in cuts(text):
        parts = told(shared, pieces)
        assert parts.content == expected.get("content", "")
        assert parts.reasoning == expected.get("thinking", "")
        calls = [(each["function"]["name"], each["function"]["arguments"]) for each in expected.get("tool_calls", [])]
        assert [(name, json.loads(arguments)) for name, arguments in parts.calls] == calls


def test_text_of_parts_that_are_left_out_is_content() -> None:
    text = '<think>a</think>B <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert told(tables(None, None), list(text)) == Parts(text, "", [])


def test_the_prompt_may_have_begun_the_message() -> None:
    shared = tables()
    assert told(shared, ["hm</think>", "Yes"], "<think>\n") == Parts("Yes", "hm", [])
    assert told(shared, ["Yes"], "<think>\n\n</think>\n\n") == Parts("Yes", "", [])
    template = shared.template
    assert template.begun("<|im_start|>assistant\nA<|im_end|>\n<|im_start|>assistant\n<think>\n") == "<think>\n"
    assert template.begun("no mark") == ""
    # Mistral's templates write nothing before an answer to the result of a tool.
    result = '[INST]Hi[/INST][TOOL_CALLS][{"name": "f"}]</s>[TOOL_RESULTS]{"content": 1}[/TOOL_RESULTS]'
    assert template.begun(result) == ""


def test_a_prompt_that_only_ends_the_reasoning_has_left_it_out() -> None:
    """As DeepSeek-V3.1's, whose answers to results go on behind them."""
    forms = find_forms(None, "{{ tools }} <｜tool▁sep｜></think>")
    assert forms.begun("<｜User｜>Hi<｜Assistant｜></think>") == "<think></think>"
    assert forms.begun("<｜User｜>Hi<｜Assistant｜><think>") == "<think>"
    assert forms.begun("<｜Assistant｜></think><｜tool▁output▁begin｜>4<｜tool▁output▁end｜>") == ""
    answer = forms.answer("<think></think>", None)
    assert (answer.reasoned, answer.reasons, answer.feed("A</think>").content) == (True, False, "A</think>")


def test_the_space_after_the_prompts_part_is_kept() -> None:
    shared = tables("hermes")
    assert told(shared, list(" world and "), "Hello") == Parts(" world and ", "", [])
    assert told(shared, ["world"], "Hello ") == Parts("world", "", [])
    assert told(shared, [" more</think>", "\nYes"], "<think>\nhm") == Parts("Yes", " more", [])


def test_a_form_keeps_its_white_space() -> None:
    def answer(*pieces: str) -> str:
        answer = AnswerText(tables("hermes"), keeps_end=True)
        return "".join(each.content for each in [*map(answer.feed, pieces), answer.finish()])

    assert answer(" yes", " \n") == " yes \n"
    assert answer("<think>hm</think>\n\n", "yes ") == "yes "


@pytest.mark.parametrize(
    ("form", "begun"),
    [
        ("hermes", '<tool_call>{"na'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "'),
        ("qwen3-coder", "<tool_call><function=f><parameter=a>1"),
        ("pythonic", "[f(a=1), f("),
    ],
)
def test_copies_go_on_by_themselves(form: str, begun: str) -> None:
    start = AnswerText(tables(form), begun, SCHEMAS)
    ends = ('me": "f"}</tool_call>', '"}}</tool_call>', "</parameter></function></tool_call>", "b=2)]", " other")
    for end in ends:
        copy, alone = start.copied(), AnswerText(tables(form), begun, SCHEMAS)
        assert (copy.feed(end), copy.finish()) == (alone.feed(end), alone.finish())


PARAMETER = "<tool_call><function=g><parameter={}>{}</parameter></function></tool_call>"


@pytest.mark.parametrize("schema", [{"anyOf": 5}, {"oneOf": {}}, {"type": 5}, {"type": {"a": 1}}, 5])
def test_a_schema_that_names_no_type_leaves_texts(schema: Any) -> None:
    answer = AnswerText(tables("qwen3-coder"), "", {"g": {"properties": {"x": schema}}})
    calls = [*answer.feed(PARAMETER.format("x", "1")).calls, *answer.finish().calls]
    assert [call.arguments for call in calls] == ["", '{"x": "1"}']


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$ref": "#/$defs/n"}, 12),
        ({"anyOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/loop"}]}, 12),
        ({"allOf": [{"$ref": "#/$defs/n"}]}, 12),
        ({"enum": [12, "a"]}, 12),
        ({"const": 12}, 12),
        ({"$ref": "#/$defs/loop"}, "12"),
        ({"$ref": "#/$defs/none"}, "12"),
        ({"$ref": 5}, "12"),
    ],
)
def test_types_are_found_by_references_and_values(schema: Any, value: Any) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}] * 8}
    parameters = {"properties": {"x": schema}, "$defs": {"n": {"type": "integer"}, "loop": loop}}
    for pieces in cuts(PARAMETER.format("x", "12")):
        answer = AnswerText(tables("qwen3-coder"), "", {"g": parameters})
        parts = [*map(answer.feed, pieces), answer.finish()]
        assert json.loads("".join(call.arguments for part in parts for call in part.calls)) == {"x": value}


@pytest.mark.parametrize("value", ["[" * 20_000, '["\\ud800"]', "[NaN]", "[1e999]"], ids=["deep", "half", "nan", "inf"])
def test_what_is_no_array_stays_a_text(value: str) -> None:
    answer = AnswerText(tables("qwen3-coder"), "", {"g": {"properties": {"x": {"type": "array"}}}})
    calls = [*answer.feed(PARAMETER.format("x", value)).calls, *answer.finish().calls]
    assert [call.arguments for call in calls] == ["", json.dumps({"x": value})]


def test_a_deep_name_is_no_call() -> None:
    text = f"[a{'.a' * 5000}(x=1)]"
    assert told(tables("pythonic"), [text]) == Parts(text, "", [])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"x":' + "[" * 60_000),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + "[" * 60_000),
        ("hermes", '<tool_call>{"x": "' + "a" * 60_000),
        ("hermes", '<tool_call>{"x": [' + "1," * 30_000),
        ("pythonic", "[f(x=" + "[" * 60_000),
        ("qwen3-coder", "<tool_call><function=f>" + "<parameter=a>" * 4600 + "</function></tool_call>"),
        ("qwen3-coder", "<tool_call><function=f>" + "<parameter=" * 5400 + "</parameter></function></tool_call>"),
    ],
)
def test_no_text_takes_long(form: str, text: str) -> None:
    begin = time.process_time()
    told(tables(form), [text])
    assert time.process_time() - begin < 0.5  # ten times of what is usual; seconds where it grows with the square


def test_a_models_own_pattern_takes_no_longer() -> None:
    own = json.loads(json.dumps(OWN))
    own["fields"]["tool_calls"]["content_args"]["tag_pattern"] = r"(?P<key>\w+)=(?P<value>.*?)!"
    begin = time.process_time()
    parts = told(ParserTables(load_template(own)), ["<call:f>" + "a=" * 30_000 + "</call>"])
    assert time.process_time() - begin < 0.5
    assert not parts.calls


def test_little_is_withheld() -> None:
    """Text comes at once but for what may be a mark, and white space that may be the answer's last."""
    answer = AnswerText(tables("hermes"))
    shown = [answer.feed(piece).content for piece in ("a", " b ", "<", "b>", " <tool", "_", "x")]
    assert shown == ["a", " b", "", " <b>", "", "", " <tool_x"]
    answer.feed('<tool_call>{"name": "f", "arguments": ')
    pieces = [answer.feed(piece).calls for piece in ('{"a', '": "', "<", 'b"', "}}")]
    assert [[part.arguments for part in parts] for parts in pieces] == [["", '{"a'], ['": "'], ["<"], ['b"'], ["}"]]


def test_empty_marks_do_not_hold_a_parser() -> None:
    own = {"start_anchor": "A:", "fields": {"content": {}, "thinking": {"open_pattern": "(?=x)", "close_pattern": ""}}}
    shared = ParserTables(load_template(own))
    for pieces in cuts("axxb"):
        parts = told(shared, pieces)
        assert sorted(parts.content + parts.reasoning) == sorted("axxb")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (5, "object"),
        ({"version": 2}, "version 2"),
        ({"extra": 1}, "'extra'"),
        ({"fields": {}}, "'fields'"),
        ({"start_anchor": None}, "start_anchor"),
        ({"fields": {"content": {"open_pattern": "("}}}, "open_pattern"),
        ({"fields": {"content": {"open": "a", "open_pattern": "a"}}}, "both"),
        ({"fields": {"content": {"open": [""]}}}, "'open'"),
        ({"fields": {"content": {"content": "yaml"}}}, "yaml"),
        ({"fields": {"content": {"shape": 1}}}, "'shape'"),
        ({"fields": {"a": {}, "b": {}}}, "only one"),
    ],
)
def test_what_is_wrong_with_a_template_is_said(changed: Any, words: str) -> None:
    with pytest.raises(TemplateSpecError, match=words):
        load_template({**spec(), **changed} if isinstance(changed, dict) else changed)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ tools }} <tool_call> </think>", "hermes", "think"),
        ("{{ tools }} <tool_call><function=", "qwen3-coder", None),
        ("{{ tools }} [TOOL_CALLS]", "mistral", None),
        ("{{ tools }} [TOOL_CALLS]x[ARGS] [THINK]", "mistral-args", "mistral-think"),
        ('{{ tools }} {"name": function name, "parameters"', "llama3-json", None),
        ("{{ tools }} [func_name1(params_name1=params_value1)]", "pythonic", None),
        ("{{ tools }} in a form of its own", None, None),
        ("{{ tools }} respond with <|tool_call|> and a list. Here is my thought process:", "granite", "granite"),
        ("{{ tools }} <|tool_call|>{}<|/tool_call|>", "phi4-mini", None),
        ("{{ messages[0]['tools'] }} <|tool|><|/tool|>", "phi4-mini", None),
        ("{{ tools }} functools[", "functools", None),
        ("{{ tools }} <｜tool▁sep｜> + '```json'  </think>", "deepseek-v3", "think"),
        ("{{ tools }} <｜tool▁sep｜>", "deepseek-v31", None),
    ],
)
def test_forms_are_found_by_the_chat_template(template: str, tools: str | None, reasoning: str | None) -> None:
    fields = {field.name: field.spec for field in find_forms(None, template).template.fields}
    assert fields.get("tool_calls") == (None if tools is None else TOOL_FORMS[tools].field)
    assert fields.get("reasoning_content") == (None if reasoning is None else REASONING_FORMS[reasoning].field)


def test_options_win_over_the_models_own_template() -> None:
    forms = find_forms(OWN, "{{ tools }}")
    assert [field.name for field in forms.template.fields] == ["thinking", "tool_calls", "content"]
    named = find_forms(OWN, "{{ tools }}", "hermes", "think").template
    assert {field.name: field.spec for field in named.fields} == {
        **spec("hermes")["fields"],
        "content": OWN["fields"]["content"],
    }
    off = find_forms(OWN, "{{ tools }}", NONE, NONE)
    assert [field.name for field in off.template.fields] == ["content"]
    assert not off.calls


def test_the_template_for_tools_says_how_calls_are_written() -> None:
    forms = find_forms(None, "{{ messages }} </think>", tool_template="{{ tools }} [TOOL_CALLS]")
    assert not forms.inserted
    assert {field.name: field.spec for field in forms.template.fields} == spec("mistral", "think")["fields"]
    assert find_forms(None, "{{ tools }} [TOOL_CALLS]", tool_template="{{ messages }}").inserted


def test_a_template_without_tools_gets_ours() -> None:
    assert find_forms(None, "{{ messages }}").inserted
    assert not find_forms(None, "{{ messages }}", NONE).calls
    assert not find_forms(None, None).calls


def test_the_options_name_all_forms() -> None:
    assert set(ToolParser) == {"auto", NONE, HARMONY, *TOOL_FORMS}
    assert set(ReasoningParser) == {"auto", NONE, HARMONY, *REASONING_FORMS}


def test_tokens_that_are_marks_are_known() -> None:
    def shown(form: str) -> list[str]:
        template = tables(form).template
        return [
            token for token in ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "<|x|>") if template.shows(token)
        ]

    assert shown("mistral-args") == ["[TOOL_CALLS]", "[ARGS]", "<think>"]
    assert shown("llama3-json") == ["<|python_tag|>", "<think>"]


FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *(
        '{"name": "f", "arguments": {"a": 1}}',
        '{"name": "g", "parameters": {}}',
        '"name"',
        ":",
        ",",
        "{",
        "}",
        "[",
        "]",
    ),
    *("<|tool_call|>", "<|/tool_call|>", "functools", "```", "```json\n", *V3.split("{}"), *V31.split("{}")),
    *("[f(a=1)", ", g()]", "(", ")", '"', "'", "\\", "null", "-1.5e3", "é🙂", "<function=g>", "</function>", "f"),
]


@pytest.mark.parametrize("form", TOOL_FORMS)
def test_whatever_is_written_is_told_apart_in_one_way(form: str) -> None:
    """Nothing that a model can write raises, nor depends on how it comes."""
    shared, draw = tables(form), random.Random(3)
    for _ in range(150):
        text = "".join(draw.choices(FRAGMENTS, k=draw.randint(1, 14)))
        whole = told(shared, [text])
        assert told(shared, list(text)) == whole, text
        if not whole.calls and "<think>" not in text:
            assert whole.content == text, "nothing is lost"
        at = draw.randrange(len(text))
        assert told(shared, [text[:at], text[at:]]) == whole, text
