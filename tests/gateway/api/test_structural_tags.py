"""Structural tags: which answers they accept, by the library that follows them, and what is refused."""

from typing import Any

import llguidance
import pytest
from pydantic import ValidationError

from services.gateway.api.errors import ApiError
from services.gateway.api.grammars.checks import GrammarChecks
from services.gateway.api.grammars.structured_output import grammar_of
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.requests.structured import ResponseFormat, StructuredOutputs
from services.gateway.api.requests.validation import validate_request
from services.gateway.text.tokenizer import Tokenizer
from tests.gateway.running_processes import running_processes
from tests.gateway.tokenizer_files import byte_level

TOKENIZER = Tokenizer(byte_level(), {})
COMPILED = llguidance.LLTokenizer(TOKENIZER.backend.to_str())

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}
WORD = {"type": "regex", "pattern": "[a-z]+"}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(**fields: Any) -> dict[str, Any]:
    tags = [tag("<f=a>", INTEGER, "</f>"), tag("<f=b>", WORD, "</f>"), tag("<g>", text("x"), "</g>")]
    return {"type": "triggered_tags", "triggers": ["<f=", "<g>"], "tags": tags, **fields}


def accepts(grammar: str, answer: str) -> bool:
    """True for a whole answer, which the model's tokenizer cuts into tokens."""
    matcher = llguidance.LLMatcher(COMPILED, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.encode(answer, add_special_tokens=False).tolist()
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def of(format: dict[str, Any], **options: Any) -> str:
    form = {"structural_tag": {"format": format}, **options}
    return grammar_of(None, StructuredOutputs.model_validate(form), TOKENIZER.marks)[0]


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        (text('a"b\n'), ['a"b\n'], ["a", ""]),
        (INTEGER, ["12", "-3"], ["1.5", "x"]),
        ({"type": "json_schema", "json_schema": True}, ['{"a": [null]}'], ["{"]),
        (WORD, ["abc"], ["", "a1"]),
        ({"type": "grammar", "grammar": 'root ::= "x" [0-9]'}, ["x1"], ["x"]),
        (ANY, ["", "anything\nat <f=> all"], []),
        ({"type": "any_text", "excludes": ["<f", "bad/"]}, ["", "<g bad"], ["a<f", "bad/"]),
        ({"type": "sequence", "elements": [text("a"), INTEGER, text("b"), ANY]}, ["a1b", "a1bxx"], ["a1", "1b"]),
        ({"type": "or", "elements": [text("yes"), INTEGER, tag("<", WORD, ">")]}, ["yes", "3", "<ab>"], ["<ab", "no"]),
        ({"type": "optional", "content": text("ab")}, ["", "ab"], ["abab"]),
        ({"type": "star", "content": text("ab")}, ["", "abab"], ["a"]),
        ({"type": "plus", "content": tag("<", INTEGER, ">")}, ["<1>", "<1><2>"], [""]),
        (tag("<a>", ANY, "</a>"), ["<a></a>", "<a>x<a></a>"], ["<a>", "<a></a>x", "x<a></a>"]),
        (tag("<a>", WORD, ["</a>", "!"]), ["<a>x</a>", "<a>x!"], ["<a>x"]),
        (tag("<a>", ANY, ["</a>", "!"]), ["<a>x1</a>", "<a>!"], ["<a>x", "<a>!!"]),
        (tag("<a>", tag("<b>", ANY, "</b>"), "</a>"), ["<a><b>x</a></b></a>"], ["<a><b>x</b>", "<a>x</a>"]),
        (tag("<a>", tag("<b>", ANY, ""), "</a>"), ["<a><b>xyz</a>"], ["<a><b>xyz"]),
        (tag("a: ", ANY, ""), ["a: xyz", "a: "], ["xyz"]),
        (tag("<", {"type": "grammar", "grammar": 'start: "{" /[a-z]/'}, ">"), ["<{a>"], ["<a>"]),
    ],
)
def test_formats_are_those_of_xgrammar(format: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    grammar = of(format)
    assert [answer for answer in right if not accepts(grammar, answer)] == []
    assert [answer for answer in wrong if accepts(grammar, answer)] == []


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        (
            triggered(),
            ["", "hello <f", "<f=a>1</f>", "x<f=b>ab</f>y<f=a>-2</f><g>x</g>z"],
            ["<f=a>x</f>", "<f=c>", "x<f=a>1", "<g>y</g>"],
        ),
        (triggered(at_least_one=True), ["<f=a>1</f>", "<g>x</g>and<f=b>a</f>"], ["", "x", "x<f=a>1</f>"]),
        (triggered(stop_after_first=True), ["", "x", "x<f=a>1</f>"], ["<f=a>1</f>x"]),
        (triggered(at_least_one=True, stop_after_first=True), ["<g>x</g>"], ["", "<g>x</g><g>x</g>", "x"]),
        (triggered(excludes=["no"]), ["n<g>x</g>o"], ["no", "<g>x</g>no", "no<g>x</g>"]),
        (tag("<o>", triggered(), "</o>"), ["<o></o>", "<o>a<f=a>1</f>b</o>"], ["<o>a", "<o></o>a", "<o><f=c></o>"]),
        (
            {"type": "tags_with_separator", "separator": ", ", "tags": [tag("<", INTEGER, ">"), tag("(", WORD, ")")]},
            ["", "<1>", "<1>, (a), <2>"],
            ["<1>, ", "<1><2>", "x"],
        ),
        (
            {
                "type": "tags_with_separator",
                "separator": ",",
                "tags": [tag("<", INTEGER, ">")],
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["<1>"],
            ["", "<1>,<1>"],
        ),
    ],
)
def test_tags_come_between_texts(format: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    grammar = of(format)
    assert [answer for answer in right if not accepts(grammar, answer)] == []
    assert [answer for answer in wrong if accepts(grammar, answer)] == []


def test_marks_are_the_tokens_that_the_model_has_for_them() -> None:
    """`<think>` and `<|im_start|>` are tokens. The model never writes them with others."""
    grammar = of(tag("<think>", ANY, "</think>"))
    assert accepts(grammar, "<think>so <f</think>")
    assert not accepts(grammar, "<think>so<think></think>")
    tags = [tag("<think>\n", INTEGER, "\n</think>"), tag("<|im_start|>a", WORD, "<|im_end|>")]
    grammar = of({"type": "triggered_tags", "triggers": ["<th", "<|im_start|>"], "tags": tags})
    assert accepts(grammar, "well: <think>\n12\n</think> then <|im_start|>abc<|im_end|>")
    assert accepts(grammar, "any <th")
    assert not accepts(grammar, "<think>12</think>")
    assert not accepts(grammar, "<think>")


def test_the_older_notation_is_one_of_triggers() -> None:
    older = {
        "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f="],
    }
    for format in (older, {**older, "type": "structural_tag"}):
        grammar, _ = grammar_of(None, StructuredOutputs.model_validate({"structural_tag": format}))
        assert accepts(grammar, "so: <f=a>12</f>.")
        assert not accepts(grammar, "so: <f=a>x</f>.")
    over_response_format, param = grammar_of(ResponseFormat.model_validate({**older, "type": "structural_tag"}), None)
    assert (over_response_format, param) == (grammar, "response_format")


def test_a_tag_may_be_text_as_from_clients_of_vllm() -> None:
    form = {"structural_tag": '{"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}'}
    assert accepts(grammar_of(None, StructuredOutputs.model_validate(form))[0], "x")


def test_options_of_json_reach_the_schemas_in_tags() -> None:
    schema = {"type": "json_schema", "json_schema": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    format = tag("<", schema, ">")
    assert accepts(of(format), '<{"a": 1, "b": 2}>')
    assert accepts(of(format, disable_any_whitespace=True), '<{"a":1}>')
    assert not accepts(of(format, disable_any_whitespace=True), '<{"a": 1}>')
    assert accepts(of(format, whitespace_pattern="\n?"), '<{\n"a":\n1}>')
    assert not accepts(of(format, disable_additional_properties=True), '<{"a": 1, "b": 2}>')


@pytest.mark.parametrize(
    ("format", "words"),
    [
        ({"type": "sequence", "elements": [ANY, text("a")]}, "put them last"),
        ({"type": "star", "content": ANY}, "put them last"),
        ({"type": "json_schema", "json_schema": False}, "matches nothing"),
        ({"type": "grammar", "grammar": "root ::= ("}, r"line 1: '\)' is expected"),
        (triggered(triggers=["<f=a", "<f", "<g>"]), "2 triggers begin the tag '<f=a>'"),
        (triggered(triggers=["<f="]), "0 triggers begin the tag '<g>'"),
        (triggered(triggers=["<f=", "<g>", "<h"]), "no tag begins with the trigger '<h'"),
        (tag("<o>", triggered(triggers=["<"]), "<o>"), "in the mark that ends"),
        ({"type": "plus", "content": tag("<", ANY, "")}, "put them last"),
        (tag("<", WORD, ["", ">"]), "ends nothing"),
        ({"type": "sequence", "elements": [text("a")] * 256}, "at most 256 formats"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_words(format: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        of(format)
    assert (refused.value.param, refused.value.code) == ("structured_outputs.structural_tag", "invalid_grammar")


def test_tags_are_bounded_in_depth_and_in_characters() -> None:
    deep: dict[str, Any] = text("a")
    for _ in range(40):
        deep = {"type": "sequence", "elements": [deep]}
    with pytest.raises(ApiError, match="32 deep"):
        of(deep)
    with pytest.raises(ApiError, match="at most 65536 characters"):
        of({"type": "sequence", "elements": [text("a" * 40_000)] * 2})
    for _ in range(400):
        deep = {"type": "sequence", "elements": [deep]}
    with pytest.raises(ValidationError):
        of(deep)


@pytest.mark.parametrize(
    "tag",
    [
        {},
        {"format": {"type": "token", "token": 3}},
        {"format": {**INTEGER, "style": "qwen_xml"}},
        {"format": {**INTEGER, "any_order": True}},
        {"format": ANY, "triggers": ["<"]},
        {"format": ANY, "structures": [{"begin": "<", "schema": {}, "end": ">"}], "triggers": ["<"]},
        {"structures": [{"begin": "<", "schema": {}, "end": ">"}]},
        {"type": "poem", "format": ANY},
        "{",
    ],
)
def test_tags_of_no_notation_are_refused(tag: Any) -> None:
    with pytest.raises(ValidationError):
        StructuredOutputs.model_validate({"structural_tag": tag})


@pytest.mark.parametrize(
    ("format", "param", "words"),
    [
        ({"type": "bogus"}, "", "Formats of type 'bogus' are not supported by this server, only const_string, "),
        ({"value": "x"}, "", "It must be an object with a 'type'."),
        (5, "", "It must be an object with a 'type'."),
        ({"type": "regex"}, ".pattern", "Missing"),
        ({"type": "sequence", "elements": [{**INTEGER, "json_schema": 5}]}, ".elements[0].json_schema", "boolean"),
        ({"type": "star", "content": {"type": "tag", "begin": "<", "content": ANY}}, ".content.end", "Missing"),
        (tag("<", ANY, 5), ".end", "a string"),
        (tag("<", ANY, [">", 5]), ".end[1]", "a string"),
        (tag("<", {"type": "plus", "content": text("")} | {"odd": 1}, ">"), ".content.odd", "Unrecognized"),
    ],
    ids=str,
)
def test_errors_name_the_fields_of_formats(format: Any, param: str, words: str) -> None:
    for given, root in (
        ({"response_format": {"type": "structural_tag", "format": format}}, "response_format.format"),
        ({"structured_outputs": {"structural_tag": {"format": format}}}, "structured_outputs.structural_tag.format"),
    ):
        body = {"messages": [{"role": "user", "content": "Hi"}], **given}
        with pytest.raises(ApiError) as refused:
            validate_request(body, ChatRequest, {})
        assert refused.value.param == root + param
        assert words in refused.value.message


async def test_a_grammar_is_read_as_nothing_but_lark() -> None:
    """llguidance has another notation, in JSON, which reaches its inside."""
    async with running_processes(TOKENIZER) as processes:
        checks = GrammarChecks(processes)
        for text in ("{", '{"grammars": [{"json_schema": {}}]}'):
            with pytest.raises(ApiError, match="grammar"):
                await checks.check(of({"type": "grammar", "grammar": text}), "grammar", "a")
            whole = grammar_of(None, StructuredOutputs.model_validate({"grammar": text}))[0]
            with pytest.raises(ApiError, match="grammar"):
                await checks.check(whole, "grammar", "a")


async def test_a_schema_in_a_tag_is_compiled_before_a_worker_gets_it() -> None:
    unknown = {"type": "json_schema", "json_schema": {"type": "array", "contains": {"type": "null"}}}
    async with running_processes(TOKENIZER) as processes:
        with pytest.raises(ApiError, match="contains"):
            await GrammarChecks(processes).check(of(tag("<", unknown, ">")), "structured_outputs", "a")
