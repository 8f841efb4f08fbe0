"""Histories of agents, which never change, are read whatever is in them; what is left out of a prompt is named."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.gateway.api.records.request_record import IGNORED_FIELDS
from services.gateway.openai.responses.store import MemoryResponseStore
from tests.gateway.openai.test_bad_input import assert_refused
from tests.gateway.openai.test_tools import CALLED, TEMPLATE, WEATHER, write
from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"town": "Ulm"}'}
SECOND = {**CALL, "call_id": "c2"}
CUT_OFF = {**CALL, "arguments": '{"town": "U'}
RAIN = {"type": "function_call_output", "call_id": "c1", "output": "Rain."}
SUN = {**RAIN, "call_id": "c2", "output": "Sun."}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
FILE = {"type": "input_file", "file_id": "file-1"}
TEXT = {"type": "input_text", "text": "Rain."}
REASONING = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "R"}]}
ANSWER = {"role": "assistant", "content": [{"type": "output_text", "text": "No."}]}
WITH_ALL = [HI, REASONING, CALL, RAIN]


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def left_in_words(kind: str) -> dict[str, Any]:
    return {**RAIN, "output": f"[{kind}: this model reads text alone]"}


# Items, others of the same prompt, and what is named of the others.
SAME: dict[str, tuple[list[Any], list[Any], str]] = {
    "no content": ([said("")], [said([])], ""),
    "null": ([said("")], [said(None)], ""),
    "an answer of null": ([HI, said("", "assistant"), HI], [HI, said(None, "assistant"), HI], ""),
    "a text of null": ([said("")], [said([{"type": "input_text", "text": None}])], ""),
    "arguments as an object": ([HI, CALL, RAIN], [HI, {**CALL, "arguments": {"town": "Ulm"}}, RAIN], ""),
    "no arguments": ([HI, {**CALL, "arguments": "{}"}, RAIN], [HI, {**CALL, "arguments": None}, RAIN], ""),
    "a list of arguments": ([HI, {**CALL, "arguments": "[1]"}, RAIN], [HI, {**CALL, "arguments": [1]}, RAIN], ""),
    "an output of null": ([HI, CALL, {**RAIN, "output": ""}], [HI, CALL, {**RAIN, "output": None}], ""),
    "an output of values": (
        [HI, CALL, {**RAIN, "output": '{"a":[1]}'}],
        [HI, CALL, {**RAIN, "output": {"a": [1]}}],
        "",
    ),
    "an image": (
        [HI, CALL, left_in_words("input_image")],
        [HI, CALL, {**RAIN, "output": [IMAGE]}],
        "input[2].output[0]",
    ),
    "a file": ([HI, CALL, left_in_words("input_file")], [HI, CALL, {**RAIN, "output": [FILE]}], "input[2].output[0]"),
    "other order": ([HI, CALL, SECOND, RAIN, SUN], [HI, CALL, SECOND, SUN, RAIN], ""),
    "ids": ([HI, CALL, RAIN], [{**HI, "id": 7}, {**CALL, "id": "x" * 99, "call_id": 5}, {**RAIN, "call_id": 5}], ""),
    "a refusal": ([HI, ANSWER, HI], [HI, said([{"type": "refusal", "refusal": "No."}], "assistant"), HI], ""),
    "a citation": (
        [HI, said("No.\n[image: this model reads text alone]", "assistant"), HI],
        [HI, said([ANSWER["content"][0], {"type": "image"}], "assistant"), HI],
        "input[1].content[1]",
    ),
    "encrypted": (WITH_ALL, [HI, {**REASONING, "encrypted_content": "x"}, CALL, RAIN], "input[1].encrypted_content"),
    "not encrypted": (WITH_ALL, [HI, {**REASONING, "encrypted_content": None}, CALL, RAIN], ""),
    **{
        f"a {kind}": ([HI, ANSWER, HI], [HI, {"type": kind, "id": "a", "status": "completed"}, ANSWER, HI], "input[1]")
        for kind in (
            *("code_interpreter_call", "compaction", "computer_call", "computer_call_output", "file_search_call"),
            *("image_generation_call", "local_shell_call", "local_shell_call_output", "mcp_call", "mcp_list_tools"),
            *("tool_search_call", "tool_search_output", "web_search_call", "of_next_year"),
        )
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api(template=TEMPLATE, response_store=MemoryResponseStore(60, time.monotonic)) as running:
        running.generator.max_model_len = 4096
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict() -> AsyncIterator[Api]:
    async with running_api(template=TEMPLATE, strict_fields=True) as running:
        yield running


async def prompt_of(api: Api, **fields: Any) -> tuple[str, str]:
    """The prompt that the request's worker would get, and the fields that were named."""
    answer = await api.http.post("/v1/responses/render", json=fields)
    assert answer.status_code == 200, answer.text
    text = api.tokenizer.backend.decode(answer.json()["token_ids"], skip_special_tokens=False)
    return text, answer.headers.get(IGNORED_FIELDS, "")


@pytest.mark.parametrize("name", SAME)
async def test_a_history_is_read_whatever_is_in_it(api: Api, strict: Api, name: str):
    plain, other, named = SAME[name]
    prompt, nothing = await prompt_of(api, input=plain)
    assert (nothing, prompt.count("<|im_start|>")) != ("", 0)
    assert await prompt_of(api, input=other) == (prompt, named)
    if named:
        assert_refused(await strict.http.post("/v1/responses", json={"input": other}), named, "unsupported_parameter")


async def test_arguments_that_are_cut_off_are_shown_as_they_are(api: Api):
    prompt, _ = await prompt_of(api, input=[HI, CUT_OFF, RAIN])
    assert '{"name": "weather", "arguments": "{\\"town\\": \\"U"}' in prompt


async def test_what_is_kept_is_read_like_what_is_sent(api: Api):
    """A response to such a history is continued: all of it is there."""
    for plain, other, _ in SAME.values():
        kept = await api.http.post("/v1/responses", json={"input": other})
        sent = await prompt_of(api, input=[*plain, said("Hello", "assistant"), HI])
        assert await prompt_of(api, input=[HI], previous_response_id=kept.json()["id"]) == sent


async def test_references_stand_for_items_of_kept_responses(api: Api):
    write(api, CALLED)
    tools = [{"type": "function", **WEATHER["function"]}]
    first = (await api.http.post("/v1/responses", json={"input": "Hi", "tools": tools})).json()
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "Rain."}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    whole, _ = await prompt_of(api, input=[HI, *first["output"], *outputs])
    for kind in ({"type": "item_reference"}, {}):
        references = [{**kind, "id": item["id"]} for item in first["output"]]
        assert await prompt_of(api, input=[HI, *references, *outputs]) == (whole, "")
    for item_id in ("msg_1", first["output"][0]["id"] + "0", f"msg_{5:036x}"):
        answer = await api.http.post("/v1/responses", json={"input": [{"type": "item_reference", "id": item_id}]})
        assert_refused(answer, "input", "item_not_found", 404, says="'store': false")
