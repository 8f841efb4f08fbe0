"""Grammars of requests: which answers they accept, by the library that follows them, and what is refused."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import llguidance
import psutil
import pytest
from pydantic import ValidationError

from services.gateway.api.errors import ApiError
from services.gateway.api.grammars.checks import GrammarChecks
from services.gateway.api.grammars.json_schema import close_objects
from services.gateway.api.grammars.structured_output import grammar_of
from services.gateway.api.requests.structured import ResponseFormat, StructuredOutputs
from services.gateway.side import processes as side_processes
from services.gateway.side.processes import SideProcesses
from services.gateway.text.tokenizer import Tokenizer
from tests.gateway.running_processes import busy_ones, running_processes
from tests.gateway.tokenizer_files import byte_level

BYTES = llguidance.LLTokenizer("byte")
EXPLODING = '{"grammars": [{"lark_grammar": "start: /((a{100}){100}){100}/"}]}'


def accepts(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def structured(**form: Any) -> str:
    return grammar_of(None, StructuredOutputs.model_validate(form))[0]


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ({"json": {"type": "array", "items": {"type": "integer"}}}, ["[]", "[1, -2]"], ["[1,2]", "[1", "{}"]),
        ({"json": '{"enum": ["x", null]}'}, ['"x"', "null"], ["x"]),
        ({"json_object": True}, ["{}", '{"a": [1.5, true]}'], ["[]", '{"a" : 1}']),
        ({"regex": "a{2}|é"}, ["aa", "é"], ["a", "aaa"]),
        ({"choice": ["a b", '"q"', "\\", "x\ny", "größe"]}, ["a b", '"q"', "\\", "x\ny", "größe"], ["a", "", "größ"]),
        ({"grammar": 'start: word ("," word)*\nword: /[a-z]+/'}, ["a", "a,bc"], [",", "a,"]),
        ({"grammar": 'root ::= "x" [0-9]+'}, ["x1", "x22"], ["x", "1"]),
        ({"grammar": 'start: "a" // ::='}, ["a"], ["b"]),
        ({"grammar": 'start: "::="'}, ["::="], ["a"]),
    ],
)
def test_answers_have_the_form_that_is_asked_for(form: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    grammar = structured(**form)
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


def test_response_formats_are_those_of_openai() -> None:
    def of(**fields: Any) -> tuple[str, str]:
        return grammar_of(ResponseFormat.model_validate(fields), None)

    assert of(type="text") == ("", "")
    assert grammar_of(None, None) == ("", "")
    grammar, param = of(type="json_object")
    assert param == "response_format"
    assert accepts(grammar, '{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    grammar, _ = of(type="json_schema", json_schema={"name": "n", "schema": schema, "strict": True})
    assert accepts(grammar, '{"a": true}')
    assert not accepts(grammar, '{"a": 1}')


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": {"uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "http://elsewhere/x"}}, "elsewhere"),
        ({"regex": "a(b"}, "unclosed group"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"regex": "((b{1000}){1000}){1000}"}, "longer than 1 s|too complex|more than 256 MiB"),
    ],
)
async def test_what_is_wrong_with_a_grammar_is_said(form: dict[str, Any], words: str) -> None:
    async with running_processes(Tokenizer(byte_level(), {})) as processes:
        checks = GrammarChecks(processes)
        for _ in range(2):
            with pytest.raises(ApiError, match=words) as refused:
                await checks.check(structured(**form), "structured_outputs", "a")
            assert refused.value.code == "invalid_grammar"
        await checks.check(structured(json_object=True), "structured_outputs", "a")


@pytest.fixture
async def processes() -> AsyncIterator[SideProcesses]:
    async with running_processes(Tokenizer(byte_level(), {})) as running:
        await GrammarChecks(running).check(structured(regex="a"), "structured_outputs", "a")
        yield running


def checks_of(checks: GrammarChecks, grammars: Iterable[str]) -> "list[asyncio.Task[None]]":
    """Starts a check of each."""
    return [asyncio.create_task(checks.check(each, "structured_outputs", "a")) for each in grammars]


async def test_all_who_ask_for_one_form_wait_for_one_job(processes: SideProcesses) -> None:
    asked = checks_of(GrammarChecks(processes), [EXPLODING] * 200)
    most = 0
    while not any(task.done() for task in asked):
        most = max(most, len(busy_ones(processes)))
        await asyncio.sleep(0.01)
    refused = await asyncio.gather(*asked, return_exceptions=True)
    assert [error.status for error in refused if isinstance(error, ApiError)] == [400] * len(asked)
    assert most == 1


async def test_a_job_of_several_ends_when_nobody_waits_for_it(processes: SideProcesses) -> None:
    checks = GrammarChecks(processes)
    first, second, third = checks_of(checks, [EXPLODING] * 3)
    await begun(processes)
    first.cancel()
    with pytest.raises(ApiError) as refused:
        await second
    assert refused.value.status == 400
    await asyncio.wait([first, third])
    others = checks_of(checks, [structured(regex="((c{100}){100}){100}")] * 2)
    await begun(processes)
    for each in others:
        each.cancel()
    await asyncio.wait(others)
    while busy_ones(processes):
        await asyncio.sleep(0.01)


async def test_many_different_forms_wait_for_each_other(processes: SideProcesses) -> None:
    forms = [structured(json={"type": "object", "properties": {f"p{n}": {}}}) for n in range(100)]
    await asyncio.gather(*checks_of(GrammarChecks(processes), forms))


async def test_a_death_that_is_not_the_form_s_own_is_not_kept(
    processes: SideProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = GrammarChecks(processes)
    with monkeypatch.context() as patch:
        patch.setattr(side_processes, "_SHORT", replace(side_processes._SHORT, cpu_s=600.0))  # it is killed before
        (killed,) = checks_of(checks, [EXPLODING])
        while not killed.done():
            for each in busy_ones(processes):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()  # as the kernel does where memory is short
            await asyncio.sleep(0.005)
        with pytest.raises(ApiError) as refused:
            await killed
    assert (refused.value.status, set(refused.value.headers)) == (503, {"retry-after"})
    with pytest.raises(ApiError) as refused:
        await checks.check(EXPLODING, "structured_outputs", "a")
    assert refused.value.status == 400


async def begun(processes: SideProcesses) -> list[psutil.Process]:
    """Returns the processes that have a job, once there is one."""
    while not (busy := busy_ones(processes)):
        await asyncio.sleep(0.01)
    return busy


def test_a_form_that_becomes_too_large_is_refused_by_its_own_name() -> None:
    letters = "".join(chr(number) for number in range(0x4E00, 0x4E00 + 20_000)) * 3
    with pytest.raises(ApiError, match="too large") as refused:
        structured(grammar=f"root ::= [{letters}]")
    assert (refused.value.param, refused.value.code) == ("structured_outputs", "string_above_max_length")
    with pytest.raises(ApiError, match="too large"):
        structured(regex="\x01" * 60_000)


@pytest.mark.parametrize(
    ("options", "right", "wrong"),
    [
        ({"disable_fallback": True}, '{"a": [1, 2]}', '{"a":[1,2]}'),
        ({"disable_any_whitespace": True}, '{"a":[1,2]}', '{"a": [1, 2]}'),
        ({"whitespace_pattern": "[ \\n]{0,2}"}, '{"a":\n [1 ,2]}', '{"a":   [1,2]}'),
        ({"disable_additional_properties": True}, '{"a": [1]}', '{"a": [1], "b": 2}'),
        ({"disable_additional_properties": False}, '{"a": [1], "b": 2}', '{"a":[1]}'),
    ],
)
def test_options_say_how_json_is_written(options: dict[str, Any], right: str, wrong: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}}
    grammar = structured(json=schema, **options)
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)


def test_closing_objects_leaves_alone_what_only_looks_like_a_schema() -> None:
    schema = {
        "properties": {"properties": {"type": "integer"}, "b": {"enum": [{"properties": 1}]}},
        "patternProperties": {"^x": {"properties": {}, "additionalProperties": True}},
        "anyOf": [{"properties": {"c": {}}}],
        "items": [{"properties": {}}],
    }
    assert close_objects(schema) == {
        **schema,
        "anyOf": [{"properties": {"c": {}}, "additionalProperties": False}],
        "items": [{"properties": {}, "additionalProperties": False}],
        "additionalProperties": False,
    }


def test_closing_objects_ends_where_schemas_are_nested_too_deeply() -> None:
    deep = '{"items":' * 1000 + "{}" + "}" * 1000
    with pytest.raises(ApiError, match="deep"):
        structured(json=deep, disable_additional_properties=True)


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "a", "whitespace_pattern": " "},
        {"choice": ["a"], "disable_any_whitespace": True},
        {"grammar": "start: A", "disable_additional_properties": True},
        {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
    ],
)
def test_options_of_json_go_with_json(form: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        structured(**form)
