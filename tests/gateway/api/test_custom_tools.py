"""Custom tools: grammars of their input inside the calls of every form, and inputs read of the calls."""

import json
import re
import time
from contextlib import suppress

import pytest

from services.gateway.api.errors import ApiError
from services.gateway.api.grammars.answer_grammar import answer_grammar
from services.gateway.api.grammars.quoted_grammar import quoted_lark, quoted_regex
from services.gateway.api.requests.tools import CustomTool
from services.gateway.text.model_output.input_text import InputText
from tests.gateway.api.test_answer_grammar import PLAIN, V31, accepts, deepseek, tagged, wanted

# As a coding agent sends it.
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
A_PATCH = '*** Begin Patch\n*** Add File: a"b\\c.py\n+x = "\té"  # <b>\n*** End Patch\n'
SUM = """
start: expr
expr: term (" + " term)*  // a comment
term: NAME | "(" expr ")"
NAME: /"[a-z]+"/ | "x".."z"
"""


def custom(syntax: str, definition: str) -> CustomTool:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return CustomTool.model_validate({"type": "custom", "custom": {"name": "c", "format": form}})


def call(form: str, text: str) -> str:
    """A call of the tool with an input, as models of a form write it."""
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    return {
        "hermes": f'<tool_call>\n{{"name": "c", "arguments": {arguments}}}\n</tool_call>',
        "mistral": f'[TOOL_CALLS] [{{"name": "c", "arguments": {arguments}}}]',
        "mistral-args": f"[TOOL_CALLS]c[ARGS]{arguments}",
        "llama3-json": f'{{"name": "c", "parameters": {arguments}}}',
        "pythonic": f"[c(input={json.dumps(text, ensure_ascii=False)})]",
        "qwen3-coder": tagged("c", input=text),
        "granite": f'<|tool_call|>[{{"name": "c", "arguments": {arguments}}}]',
        "deepseek-v31": deepseek(V31.format("c", arguments)),
    }[form]


FORMS = ["hermes", "mistral", "mistral-args", "llama3-json", "pythonic", "qwen3-coder", "granite", "deepseek-v31"]


@pytest.mark.parametrize("form", FORMS)
def test_a_grammar_holds_the_input_in_every_form(form: str) -> None:
    grammar = answer_grammar(wanted(form, "required", (custom("lark", PATCH),)), PLAIN)
    assert accepts(grammar, call(form, A_PATCH))
    for wrong in ("", "*** Begin Patch\n", A_PATCH.replace("+x", "x"), A_PATCH.replace("Add", "Eat")):
        assert not accepts(grammar, call(form, wrong)), wrong
    grammar = answer_grammar(wanted(form, "required", (custom("regex", r'[A-Z]+"\n?'),)), PLAIN)
    assert accepts(grammar, call(form, 'ABC"\n'))
    assert not accepts(grammar, call(form, "ABC"))


def test_a_tool_with_a_grammar_is_held_though_no_call_is_required() -> None:
    grammar = answer_grammar(wanted("hermes", None, (custom("regex", "[0-9]+"),)), PLAIN)
    assert accepts(grammar, "Some text. " + call("hermes", "12"))
    assert not accepts(grammar, call("hermes", "twelve"))


def test_rules_that_lead_back_to_themselves() -> None:
    quoted = quoted_lark(SUM, "p")
    for text, right in (('"ab" + (x + y)', True), ('("a")', True), ("a", False), ('"a" + ', False)):
        assert accepts(_lark(quoted), json.dumps(text)[1:-1]) is right, text


@pytest.mark.parametrize(
    "pattern",
    [
        "[^a]+",
        r'\d+\.\s"',
        r"a/b\\",
        r"\w+",
        r'\x41\u0042["\\]',
        r'[\]"]+',
        r"\S+",
        "(?:a|b){2,3}",
        ".",
        "é+",
        "(?i:AB).",
        '(?P<q>")x?',
    ],
)
def test_a_quoted_pattern_matches_what_the_pattern_does(pattern: str) -> None:
    grammar = _lark(quoted_regex(pattern, "p"))
    for text in ("", "x", '12.\t"', "a/b\\", "aé_", 'AB"', ']"', '"\\x', "aba", "\n", "\x01", "éé", "bab\n"):
        expected = re.fullmatch(pattern, text) is not None
        assert accepts(grammar, json.dumps(text, ensure_ascii=False)[1:-1]) is expected, text


@pytest.mark.parametrize(
    "definition",
    [
        'start: "a" | <foo>',
        "start: A & B",
        "start: ~A",
        "start: %json {}",
        "%import foo.BAR",
        r"start: /a\b/",
        '"\\q"',
        r'"a\n"i',
        "/a/x",
        'start: "a',
        r"start: /a\/",
    ],
)
def test_what_cannot_be_quoted_is_refused_in_words(definition: str) -> None:
    with pytest.raises(ApiError) as refused:
        quoted_lark(definition, "p")
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "p", "invalid_grammar")


@pytest.mark.parametrize(
    "definition",
    [
        "start: /a" + r"\/" * 20_000,
        'start: "a' + r"\"" * 20_000,
        "\n" * 50_000 + "x",
        "start: r0\n" + "".join(f"r{number}: r{number + 1}\n" for number in range(3_000)) + 'r3000: "a"',
        "start: /" + "(?" * 30_000 + "/",
        "start: /" + "." * 60_000 + "/",
    ],
    ids=lambda definition: repr(definition[:12]),
)
def test_a_large_grammar_is_quoted_or_refused_in_time_that_grows_with_its_size(definition: str) -> None:
    """Each took from seconds to minutes, in which the gateway answered nobody."""
    begun = time.process_time()
    with suppress(ApiError):
        quoted_lark(definition, "p")
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\"b\\\\\\n\\u00e9\\ud83d\\ude00 \\ud83dx\\q"}', 'a"b\\\né😀 \ufffdx\\q'),
        (' {\n "input" : "x", "more": 1}', "x"),
        ('{"input": "cut \\u00', "cut "),
        ('{"text": "other"}', '{"text": "other"}'),
        ("plain", "plain"),
        ("{}", "{}"),
        ('{"input": ""}', ""),
    ],
)
def test_the_input_is_read_of_any_pieces(arguments: str, text: str, size: int) -> None:
    reader = InputText()
    pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
    assert "".join(map(reader.feed, pieces)) == text


def _lark(grammar: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": grammar}]})
