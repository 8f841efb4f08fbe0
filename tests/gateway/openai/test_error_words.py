"""Errors of libraries, in answers: in words, and without the names of the libraries and of their parts."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.gateway.api.grammars.forms import wrong
from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Names of libraries and of their parts, words that name types of Rust and Python, paths and files.
INSIDES = re.compile(
    r"(?i:llguidance|derivre|toktrie|serde|jsonschema|pydantic|jinja|orjson|tokenizers|redis|grpc|numpy|starlette)"
    r"|::|\b(?:[A-Z][a-z0-9]+){2,}\b|\.(?:rs|py)\b|Traceback|panicked|'[\w.]+ object'|object at 0x"
    r"|Input should|\bservices\.|panic|<non-verbose|<backtrace|coerce_|\boption '"
)

REGEX = (
    "(", "a(b", "[a", "a{99999}", "(?=a)", "(?<=a)b", r"\1", "(?P<n>a)(?P=n)", r"\b", "^a$",
    r"\p{Foo}", "[z-a]", "*a",
    "a{2,1}", "(?<n", "\\", r"\x{110000}", r"\u12", "[[:foo:]]", r"[^\x00-\x{10FFFF}]", r"\z", "(?u-i:a)",
    "(?>a)", "[]", "((b{1000}){1000}){1000}",
)  # fmt: skip
GRAMMARS = (
    "start: x", "start: /a", 'x: "a"', 'start: "a"\nstart: "b"', "%import common.FOO\nstart: FOO", "start: A\nA: A",
    'start: A\nA: b\nb: "x"', '%ignore x\nstart: "a"', "start: /(?=a)/", "start: @foo", "start: <|nothing|>",
    "start: <[99999999]>", "start: ~A\nA: /a/", "start: %json {", 'start: %json {"type": 5}', 'start: %regex {"x": 1}',
    'start[foo=1]: "a"', r'start: "\q"', 'start: a{3,1}\na: "x"', "start: A\nA: X+\nX[lazy]: /a/", "%llguidance {",
    '%llguidance {"foo":1}\nstart: "a"', 'start: "ab".."c"', 'start: A\nA: "a" ~ 3', "%declare X\nstart: X",
    'start: start "a"', "root ::= x", "root ::= (", "::=", "root ::= [", r'root ::= "\q"', 'root ::= root "a"',
)  # fmt: skip
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "foo"}, {"$ref": "#/x"}, {"$ref": "http://a/b"}, {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "(?=a)"}, {"type": "string", "format": "foo"},
    {"type": "string", "minLength": 5, "maxLength": 1}, {"type": "integer", "minimum": 5, "maximum": 1},
    {"type": "number", "multipleOf": 0}, {"not": {"type": "string"}}, {"if": {}, "then": {}},
    {"patternProperties": {"(": {}}}, {"unevaluatedProperties": False}, {"enum": []}, {"enum": 5}, {"oneOf": []},
    {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"anyOf": 5}, {"type": ["string", 5]}, {"properties": 5},
    {"required": 5}, {"items": 5}, {"minItems": -1}, {"uniqueItems": True}, {"contains": {}},
    {"$defs": 5, "$ref": "#/$defs/x"}, {"type": "array", "minItems": 3, "maxItems": 1},
    {"type": "object", "required": ["a"], "properties": {"a": False}}, {"x-guidance": {"foo": 1}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"allOf": [{"oneOf": [{"type": "string"}, {"type": "string"}]}, {"type": "string"}]},
    {"$schema": "http://foo"}, {"$id": 5}, {"$dynamicRef": "#a"}, {"minimum": "a"},
)  # fmt: skip
TEMPLATES = (
    "{{", "{% for %}", "{{ x.y.z }}", "{{ messages[5].a }}", "{{ 1/0 }}", "{% include 'x' %}", "{{ messages|foo }}",
    "{{ messages is foo }}", "{{ ''.__class__ }}", "{{ range(10**9) }}", "{{ foo() }}", "{{ messages|sum('a') }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ strftime_now(5) }}", "{{ messages|tojson(indent='x') }}",
    "{{ dict(5) }}", "{{ cycler() }}", "{{ cycler(1).x.y }}", "{{ 'x'[1:2:0] }}", "{{ namespace(1) }}",
    "{{ namespace().a.b }}",
    "{{ loop.x.y }}", "{{ self.x.y }}", "{{ messages|sort(attribute='x') }}", "{{ joiner().x.y }}",
    "{{ ('a'|safe).x.y }}",
)  # fmt: skip
OF_OTHER_TYPES: tuple[Any, ...] = (5, "x", [[]], {"a": []})
FIELDS: tuple[dict[str, Any], ...] = (
    *({"structured_outputs": {"regex": each}} for each in REGEX),
    *({"structured_outputs": {"grammar": each}} for each in GRAMMARS),
    *({"structured_outputs": {"json": each}} for each in SCHEMAS),
    *({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": each}}} for each in SCHEMAS),
    {"structured_outputs": {"structural_tag": "{"}},
    {"structured_outputs": {"structural_tag": {"format": {"type": "tag", "begin": 5}}}},
    {"structured_outputs": {"choice": []}},
    *({name: value} for name in ("stop", "logit_bias", "tools", "stream_options") for value in OF_OTHER_TYPES),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api(trusts_templates=True) as running:
        yield running


async def test_no_error_of_a_form_or_a_field_names_a_library_or_its_parts(api: Api):
    answers = [(fields, await api.chat(**fields)) for fields in FIELDS]
    assert [(fields, answer.text) for fields, answer in answers if answer.status_code not in (200, 400)] == []
    said = [(fields, answer.json()["error"]["message"]) for fields, answer in answers if answer.status_code == 400]
    assert [each for each in said if INSIDES.search(each[1])] == []
    assert len(said) > 0.6 * len(FIELDS)


async def test_no_error_of_a_template_names_a_library_or_its_parts(api: Api):
    answers = [(source, await api.chat(chat_template=source)) for source in TEMPLATES]
    assert [(source, answer.text) for source, answer in answers if answer.status_code not in (200, 400)] == []
    said = [(source, answer.json()["error"]["message"]) for source, answer in answers if answer.status_code == 400]
    assert [each for each in said if INSIDES.search(each[1])] == []
    assert len(said) > 0.6 * len(TEMPLATES)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("panic: removal index (is 3) should be < len (is 3)\n  0: rust_begin\n  at /root/a/b.c:3\n", "it cannot be"),
        ("a fault\nPanic at lib\n<backtrace>", "a fault"),
        ("lexer error: too many expressions constructed\n<non-verbose/>", "it is too complex to be followed."),
        ("oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate", "not supported."),
        ('1(8): rule "panic" not found\n   1 | start: panic\n', "start: panic"),
    ],
)
async def test_what_is_about_a_library_s_inside_is_left_out_and_the_rest_is_not(reason: str, words: str):
    message = wrong("p", reason).message
    assert words in message
    assert not re.search(INSIDES.pattern.replace("|panic", ""), message)
    assert not re.search(r"removal|rust|/root|at lib", message)


async def test_what_a_template_says_itself_is_shown(api: Api):
    answer = await api.chat(chat_template="{{ raise_exception('A JsonSchema, please.') }}")
    assert answer.json()["error"]["message"].endswith("refuses these messages: A JsonSchema, please.")
