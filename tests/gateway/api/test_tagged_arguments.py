"""Grammars of arguments between tags: what they accept is read as arguments that match the schema."""

from collections.abc import Mapping
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import orjson
import pytest

from services.gateway.api.errors import ApiError
from services.gateway.api.grammars.answer_grammar import answer_grammar
from services.gateway.text.model_output.answer import AnswerText
from services.gateway.text.model_output.formats import TOOL_FORMS
from services.gateway.text.model_output.parser import ParserTables
from services.gateway.text.model_output.template import load_template
from tests.gateway.api.test_answer_grammar import PLAIN, accepts, tagged, tokenizer, tool, wanted

TABLES = ParserTables(
    load_template({"start_anchor": "A:", "fields": {"content": {}, "tool_calls": TOOL_FORMS["qwen3-coder"].field}})
)


def grammar_of_value(value: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    schema = {"type": "object", "properties": {"x": value}, "required": ["x"], "additionalProperties": False, **more}
    return answer_grammar(wanted("qwen3-coder", "required", tools=(tool("f", schema),)), PLAIN), schema


def read(text: str, schema: Mapping[str, Any]) -> Any:
    answer = AnswerText(TABLES, "", {"f": schema})
    calls = [*answer.feed(text).calls, *answer.finish().calls]
    return orjson.loads("".join(call.arguments for call in calls))


DEFINITIONS = {"$defs": {"kind": {"type": "string", "enum": ["a", "b c"]}, "point": {"type": "array", "items": {}}}}
TEXTS = [
    "",
    "two\nlines\n",
    "\n",
    ' "quoted" <b> {x} </para',
    "日本",
    "12",
    "true",
    "null",
    "[1]",
    '{"a": 1}',
    "1e5",
    "b c",
]


@pytest.mark.parametrize(
    ("schema", "accepted"),
    [
        ({"type": "string"}, TEXTS),
        ({}, TEXTS),
        (True, TEXTS),
        ({"type": "string", "enum": ["12", "b c"]}, ["12", "b c"]),
        ({"const": "b c"}, ["b c"]),
        ({"$ref": "#/$defs/kind"}, ["b c"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["12", "日本", "[1]", "1e5", "b c"]),
        ({"type": "string", "maxLength": 0}, [""]),
        ({"type": "string", "pattern": "^[a-z] [a-z]$"}, ["b c"]),
        ({"type": "string", "pattern": r"\d"}, ["12", "[1]", '{"a": 1}', "1e5"]),
        ({"type": "integer"}, ["12"]),
        ({"type": "number"}, ["12", "1e5"]),
        ({"type": "boolean"}, ["true"]),
        ({"type": "null"}, ["null"]),
        ({"type": "array"}, ["[1]"]),
        ({"$ref": "#/$defs/point"}, ["[1]"]),
        ({"type": "object"}, ['{"a": 1}']),
        ({"enum": [12, True]}, ["12", "true"]),
        ({"enum": [12, "b c", None]}, ["12", "b c", "null"]),
        ({"type": ["string", "null"], "maxLength": 3}, ["", "\n", "日本", "12", "[1]", "1e5", "b c", "null"]),
        (
            {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 20}]},
            ["", "日本", "[1]", "b c"],
        ),
        ({"anyOf": [{"$ref": "#/$defs/kind"}, {"$ref": "#/$defs/point"}], "default": "a"}, ["[1]", "b c"]),
        (
            {"anyOf": [{"type": "string", "maxLength": 4}, {"const": False}]},
            ["", "日本", "12", "null", "[1]", "1e5", "b c"],
        ),
        ({"type": ["string", "boolean"], "pattern": "^tr"}, ["true"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "X"}, ["12", "null"]),
        ({"allOf": [{"type": "integer"}]}, ["12"]),
    ],
)
def test_values_are_texts_or_json(schema: Any, accepted: list[str]) -> None:
    grammar, parameters = grammar_of_value(schema, **DEFINITIONS)
    assert {text for text in TEXTS if accepts(grammar, tagged("f", x=text))} == set(accepted)
    for text in accepted:
        jsonschema.validate(read(tagged("f", x=text), parameters), parameters)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 10, "maxLength": 2000},
        {"type": ["string", "null"], "maxLength": 2000},
        {"anyOf": [{"type": "string", "maxLength": 2000}, {"type": "integer"}, {"type": "array"}]},
        {"type": "string", "pattern": "[a-z]{3,8} [a-z]+"},
    ],
)
def test_long_texts_are_counted_to_their_end(schema: Any) -> None:
    """Where a grammar counts characters it must not grow with them. It then leaves `<` out of the text."""
    grammar, _ = grammar_of_value(schema)
    text = "some words, (x) > y\n" * 90
    assert accepts(grammar, tagged("f", x=text))
    assert not accepts(grammar, tagged("f", x=f"{text}<b>"))
    if "pattern" not in schema:
        assert not accepts(grammar, tagged("f", x=text * 2))


def test_the_closing_tag_may_be_a_token() -> None:
    tokens = tokenizer("</parameter>", "<tool_call>", "</tool_call>")
    for schema, wrong in (({"type": "string"}, []), ({"type": "string", "maxLength": 9}, ["ten letters"])):
        parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
        grammar = answer_grammar(wanted("qwen3-coder", "required", tools=(tool("f", parameters),)), tokens)
        assert [text for text in ("", "\n", "a\nb") if not accepts(grammar, tagged("f", x=text), tokens)] == []
        assert [text for text in (*wrong, "a</parameter>") if accepts(grammar, tagged("f", x=text), tokens)] == []


def test_a_text_is_read_as_it_is_written() -> None:
    _, schema = grammar_of_value({"type": "string"})
    assert [read(tagged("f", x=text), schema)["x"] for text in TEXTS] == TEXTS


@pytest.mark.parametrize(
    "text", ["a</parameter>b", "</parameter>", "x</function>\n </tool_call>", "</parameter>\n<parameter=y>\n1"]
)
def test_no_text_ends_its_argument(text: str) -> None:
    grammar, _ = grammar_of_value({"type": "string"})
    assert not accepts(grammar, tagged("f", x=text))


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("date", "2024-12-31", "2023-02-30"),
        ("time", "23:59:59.5Z", "24:00:00Z"),
        ("date-time", "2024-01-02T03:04:05+01:00", "2024-01-02"),
        ("uuid", "01234567-89ab-cdef-0123-456789abcdef", "0123"),
        ("email", "a.b@example.org", "a@"),
        ("ipv4", "192.168.0.255", "1.2.3.256"),
        ("uri", "https://example.org:80/a/b?c=d#e", "example.org"),
    ],
)
def test_formats_of_texts(name: str, right: str, wrong: str) -> None:
    grammar, _ = grammar_of_value({"type": "string", "format": name})
    assert accepts(grammar, tagged("f", x=right))
    assert not accepts(grammar, tagged("f", x=wrong))


def test_arguments_come_in_the_order_of_the_schema() -> None:
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in "abc"}, "required": ["b"]}
    grammar = answer_grammar(wanted("qwen3-coder", "required", tools=(tool("f", schema),)), PLAIN)
    right = [{"b": "1"}, {"a": "1", "b": "2"}, {"b": "1", "c": "2"}, {"a": "1", "b": "2", "c": "3"}]
    assert [each for each in right if not accepts(grammar, tagged("f", **each))] == []
    wrong = [{}, {"a": "1"}, {"b": "1", "a": "2"}, {"b": "1", "d": "2"}]
    assert [each for each in wrong if accepts(grammar, tagged("f", **each))] == []


def test_a_tool_that_names_no_properties_takes_any() -> None:
    grammar = answer_grammar(wanted("qwen3-coder", "required", tools=(tool("f", {"type": "object"}),)), PLAIN)
    assert accepts(grammar, tagged("f"))
    assert accepts(grammar, tagged("f", x="1", other="two\nlines"))
    assert not accepts(grammar, tagged("f", x="a</parameter>b"))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"x": {"type": "string", "format": "hostname"}}}, "format"),
        ({"properties": {"x": {"type": "string", "not": {"const": "a"}}}}, "'not'"),
        ({"properties": {"x": {"allOf": [{"type": "string"}, {"maxLength": 2}]}}}, "allOf"),
        ({"properties": {"x": {"anyOf": [{"type": "string"}], "maxLength": 2}}}, "anyOf"),
        ({"properties": {"x": {"type": "string", "pattern": "^a|b"}}}, "alternatives"),
        ({"properties": {"x": {"enum": ["a</parameter>"]}}}, "'</'"),
        ({"properties": {"x": {"type": "string", "maxLength": "1"}}}, "maxLength"),
        ({"properties": {"x": {"$ref": "#"}}}, "ref"),
        ({"properties": {"a b": {}}}, "a b"),
        ({"properties": {}, "minProperties": 1}, "minProperties"),
    ],
)
def test_a_schema_that_cannot_be_held_is_refused_by_name(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        answer_grammar(wanted("qwen3-coder", "required", tools=(tool("f", schema),)), PLAIN)
    assert refused.value.param == "tools[0].function.parameters"
