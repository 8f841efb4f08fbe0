"""Forms and templates that explode are stopped while they are worked on, and nobody else's wait for them."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from services.gateway.side import processes
from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api(trusts_templates=True) as running:
        assert (await running.complete(structured_outputs={"regex": "abc"})).status_code == 200  # all is loaded
        yield running


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def referring(number: int) -> dict[str, Any]:
    """Definitions of which each has the next one twice."""
    twice = {
        f"d{each}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{each + 1}"}] * 2} for each in range(number)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**twice, f"d{number}": {"type": "integer"}}}


def properties(number: int) -> dict[str, Any]:
    named = {f"property{each}": {"type": "string"} for each in range(number)}
    return {"type": "object", "properties": named, "additionalProperties": {"type": "integer"}}


EXPLODING: dict[str, dict[str, Any]] = {
    "nested counts": {"regex": "((a{100}){100}){100}"},
    "nested counts after a text": {"regex": "all is well: ((a{100}){100}){100}"},
    "a huge count": {"regex": "a{1000000}"},
    "nested counts in a grammar": {"grammar": 'start: "x" A\nA: /((b{100}){100}){100}/'},
    "counts of rules": {"grammar": 'start: a{100}\na: b{100}\nb: c{100}\nc: "a"{100}'},
}
CHEAP_OR_REFUSED: dict[str, dict[str, Any]] = {
    "counts of unicode classes": {"regex": r"((\p{L}{100}){100}){100}"},
    "alternatives": {"regex": "|".join(f"[a-z]{{{number}}}x" for number in range(1, 900))},
    "optional parts": {"regex": "((((a?){50}){50}){50})b"},
    "intersections": {"grammar": "start: A\nA: /(.|\\n)*foo(.|\\n)*/ & ~/(.|\\n)*(a.{18})(.|\\n)*/"},
    "many items": {"json": {"type": "array", "items": {"type": "string"}, "minItems": 10**6, "maxItems": 10**9}},
    "long strings": {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**9}},
    "arrays of arrays": {"json": {"type": "array", "minItems": 999, "items": {"type": "array", "minItems": 999}}},
    "depth": {"json": nested(40)},
    "a deep text": {"json": '{"items":' * 3000 + "{}" + "}" * 3000},
    "references that double": {"json": referring(40)},
    "references in a circle": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 2}}}},
    "a huge enum": {"json": {"enum": [f"value {number}" for number in range(3000)]}},
    "many properties": {"json": properties(1500)},
    "recursion in GBNF": {"grammar": 'root ::= a\na ::= a a | "x" a | "x"'},
    "parentheses": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    "choices": {"choice": [f"choice number {number}" for number in range(1024)]},
    "an ambiguous grammar": {"grammar": 'start: e\ne: e e e | e e | "a" | "(" e ")"'},
}
TEMPLATES = {
    "memory": "{{ 'a' * 10 ** 8 }}",
    "much memory": "{{ 'a' * 10 ** 10 }}",
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "text": "{% for i in range(9999) %}{{ 'abcdefgh' * 1024 }}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "numbers": "{{ 9 ** (9 ** 9) }}",
    "a list": "{{ ([0] * 10 ** 9) | length }}",
    "depth": "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
}


async def form(api: Api, wanted: dict[str, Any]) -> httpx2.Response:
    return await api.complete(structured_outputs=wanted)


async def test_forms_that_explode_are_refused(api: Api):
    answers = await asyncio.gather(*(form(api, wanted) for wanted in EXPLODING.values()))
    assert [(each.status_code, each.json()["error"]["code"]) for each in answers] == [(400, "invalid_grammar")] * 5


@pytest.fixture
def unending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that take long do not end while a test runs; those that end soon go on as they do."""
    monkeypatch.setattr(processes, "_LONG", replace(processes._LONG, cpu_s=600.0))


@pytest.mark.usefixtures("unending")
async def test_a_neighbours_form_is_answered_before_those_that_explode(api: Api):
    exploding = [asyncio.create_task(form(api, {"regex": f"(({each}{{100}}){{100}}){{100}}"})) for each in "fghij"]
    await asyncio.sleep(0.01)
    neighbour = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    assert (await form(api, neighbour)).status_code == 200
    assert not any(task.done() for task in exploding)
    await leave(exploding)


async def test_what_was_refused_is_refused_at_once_the_next_time(api: Api, request: pytest.FixtureRequest):
    first = await form(api, EXPLODING["nested counts"])
    request.getfixturevalue("unending")
    others = [asyncio.create_task(form(api, {"regex": f"(({each}{{100}}){{100}}){{100}}"})) for each in "bcde"]
    await asyncio.sleep(0.01)
    assert (await form(api, EXPLODING["nested counts"])).json() == first.json()
    assert not any(task.done() for task in others), "all turns are taken, and the refusal needed none"
    await leave(others)


async def leave(asked: "list[asyncio.Task[httpx2.Response]]") -> None:
    """Ends requests, as their clients' end does."""
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)


@pytest.mark.parametrize("name", CHEAP_OR_REFUSED)
async def test_every_form_is_taken_or_refused(api: Api, name: str):
    answer = await form(api, CHEAP_OR_REFUSED[name])
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["param"].startswith("structured_outputs")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_request_s_template_that_explodes_is_refused(api: Api, name: str):
    answer = await api.chat(chat_template=TEMPLATES[name])
    assert answer.status_code == 400, answer.text[:200]
    assert answer.json()["error"]["param"] in ("chat_template", "messages")


def block(begin: str, end: str, times: int) -> str:
    return begin * times + "x" + end * times


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (block("{% for i in [1] %}", "{% endfor %}", 25), "nested too deeply"),
        (block("{% if 1 %}", "{% endif %}", 120), "nested too deeply"),
        (block("{% call f() %}", "{% endcall %}", 130), "nested too deeply"),
        (block("{{ (", ") }}", 1).replace("x", block("(", ")", 300).replace("x", "1")), "nested too deeply"),
        ("{{ " + "9" * 5000 + " }}", "no valid template"),
        ("{% macro f(a, a) %}{% endmacro %}", "no valid template"),
        ("{{ f(a=1, a=2) }}", "no valid template"),
        ("{% break %}", "no valid template"),
    ],
)
async def test_a_template_that_python_cannot_follow_is_refused_for_what_it_is(api: Api, source: str, says: str):
    answer = await api.chat(chat_template=source)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "chat_template")
    assert says in error["message"]


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("field", ["chat_template_kwargs", "documents"])
async def test_what_is_too_deep_for_a_template_is_refused_by_its_field(api: Api, field: str):
    def fields(depth: int) -> dict[str, Any]:
        return {field: {"x": deep(depth)} if field == "chat_template_kwargs" else [{"x": deep(depth)}]}

    assert (await api.chat(chat_template="x", **fields(240))).status_code == 200
    answer = await api.chat(chat_template="x", **fields(252))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert "nested too deeply" in answer.json()["error"]["message"]


@pytest.mark.usefixtures("unending")
async def test_a_neighbour_chats_while_templates_explode(api: Api):
    exploding = [asyncio.create_task(api.chat(chat_template=TEMPLATES["loops"] + name)) for name in "abcd"]
    await asyncio.sleep(0.01)
    answer = await api.chat(chat_template="{{ messages[0].content }}")
    assert answer.status_code == 200
    assert not any(task.done() for task in exploding)
    await leave(exploding)


VARIABLES_TEMPLATE = (
    "{{ messages[0].content }}{{ ' ' * (indent or 0) }}{% for a in list %}{% for b in list %}x{% endfor %}{% endfor %}"
)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("variables", "status"),
    [
        ({"indent": 3}, 200),
        ({"indent": 10**10}, 400),
        ({"list": [1, 2, 3]}, 200),
        ({"list": [0] * 60_000}, 400),
        ({"list": "a" * 60_000}, 400),
    ],
)
async def test_variables_that_make_the_model_s_template_explode_are_refused(variables: dict[str, Any], status: int):
    async with running_api(template=VARIABLES_TEMPLATE) as api:
        answer = await api.chat(chat_template_kwargs=variables)
    assert answer.status_code == status, answer.text[:200]
    if status == 400:
        assert answer.json()["error"]["param"] in ("chat_template_kwargs", "messages")
