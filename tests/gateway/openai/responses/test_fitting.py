"""Room in the context: answers are cut to it, and with `truncation: "auto"` the earliest turns are dropped."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.protocol.outcomes import FinishReason
from tests.gateway.openai.test_bad_input import assert_refused
from tests.gateway.openai.test_tools import TEMPLATE, write
from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 256
STAYS, WHOLE = 252, 901  # tokens of what is never dropped, and of the whole conversation


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api(template=TEMPLATE) as running:
        running.generator.max_model_len = CONTEXT
        yield running


async def respond(api: Api, **fields: Any) -> Any:
    write(api, "Hello", finish=FinishReason.LENGTH)
    answer = await api.http.post("/v1/responses", json={"model": "m", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(api: Api) -> str:
    tokens = api.generator.requests[-1].capsules[0].token_ids.tolist()
    return api.tokenizer.backend.decode(tokens, skip_special_tokens=False)


async def test_more_tokens_than_there_is_room_for_are_cut_to_the_room(api: Api):
    response = await respond(api, input="Hi", max_output_tokens=32_000)
    capsule = api.generator.requests[-1].capsules[0]
    assert capsule.sampling.max_tokens == CONTEXT - capsule.num_prompt
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["max_output_tokens"] == 32_000


def said(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"question {number}"}


def step(number: int) -> list[dict[str, Any]]:
    """Calls of two tools whose outputs come after a message that is between them."""
    about = {"type": "function_call", "name": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "output": f"output {number}"}
    return [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {**about, "call_id": f"a{number}"},
        {**about, "call_id": f"b{number}"},
        {**output, "call_id": f"a{number}"},
        {"role": "developer" if number else "user", "content": f"between {number}"},
        {**output, "call_id": f"b{number}"},
    ]


DEVELOPER = {"role": "developer", "content": "Rules."}
CONVERSATION = [said(0), *step(0), DEVELOPER, said(1), *step(1), said(2), *step(2), said(3), *step(3), *step(4)]


@pytest.mark.parametrize("context", range(150, 960, 45))
async def test_the_earliest_turns_are_dropped_until_the_rest_fits(api: Api, context: int):
    api.generator.max_model_len = context
    fields = {"input": CONVERSATION, "instructions": "Be brief.", "truncation": "auto"}
    body = {"model": "m", **fields, "max_output_tokens": 20}
    answer = await api.http.post("/v1/responses", json=body)
    api.generator.max_model_len = CONTEXT
    if context <= STAYS:
        assert_refused(answer, "input", "context_length_exceeded")
        return
    assert answer.status_code == 200, answer.text
    assert answer.json()["truncation"] == "auto"
    capsule, prompt = api.generator.requests[-1].capsules[0], prompt_of(api)
    assert capsule.num_prompt + capsule.sampling.max_tokens <= context
    assert capsule.sampling.max_tokens == min(20, context - STAYS)
    assert all(text in prompt for text in ("Be brief.", "Rules.", *(f"between {number}" for number in range(1, 5))))
    marks = [*(f"question {number}" for number in range(4)), *(f"output {number}" for number in range(5))]
    shown = [prompt.count(mark) for mark in marks]
    assert shown[3] == 1
    assert shown[4:] in [[0] * dropped + [2] * (5 - dropped) for dropped in range(5)]
    assert all(question <= 1 for question in shown[:4])
    assert prompt.count("<tool_call>") == prompt.count("output ")
    if context > WHOLE + 20:
        assert shown == [1] * 4 + [2] * 5


async def test_whoever_asks_for_no_truncation_is_told_what_does_not_fit(api: Api):
    answer = await api.http.post("/v1/responses", json={"input": CONVERSATION, "instructions": "Be brief."})
    assert_refused(answer, "input", "context_length_exceeded", says=f"{WHOLE} tokens")
