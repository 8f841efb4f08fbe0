"""Several conversations in one request: vLLM's /v1/chat/completions/batch."""

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletion

from services.gateway.api.generation import Delta
from services.protocol.outcomes import FinishReason
from tests.gateway.running_api import MODEL, Api, running_api
from tests.gateway.scripted_generator import Script, delta_per_token, one_delta

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions/batch"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running


def conversation(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def batch(api: Api, messages: Any, **fields: Any) -> httpx2.Response:
    return await api.http.post(PATH, json={"model": MODEL, "messages": messages, **fields})


async def test_every_conversation_gets_its_choice_and_its_prompt_is_a_chat_s(api: Api):
    words = ["Hello", "größer 🙂", "no"]
    deltas = [Delta(api.tokens(word), None, FinishReason.LENGTH, 0, number) for number, word in enumerate(words)]
    api.generator.script = Script(deltas[::-1], for_all=False)
    conversations = [conversation(text) for text in ("Hi", "much longer than that", "Hi")]
    async with openai.AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": MODEL, "messages": conversations, "return_token_ids": True, "max_tokens": 9}
        answer = await client.post("/chat/completions/batch", body=asked, cast_to=ChatCompletion)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == words
    prompts = [capsule.token_ids.tolist() for capsule in api.generator.requests[-1].capsules]
    assert [choice.prompt_token_ids for choice in answer.choices] == prompts
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    api.generator.script = Script(one_delta(api.tokens("Hello")))
    alone = []
    for messages in conversations:
        await api.chat(messages=messages, max_tokens=9)
        alone.append(api.generator.requests[-1].capsules[0].token_ids.tolist())
    assert alone == prompts


async def test_fields_are_those_of_chats(api: Api):
    tokens = api.tokens("bb")
    api.generator.script = Script(delta_per_token(tokens, FinishReason.LENGTH))
    begun = [*conversation("Hi"), {"role": "assistant", "content": "aa"}]
    fields = {"echo": True, "continue_final_message": True, "structured_outputs": {"choice": ["bb"]}, "seed": 3}
    answer = (await batch(api, [begun, begun], **fields)).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["aabb", "aabb"]
    capsules = api.generator.requests[-1].capsules
    assert {capsule.sampling.seed for capsule in capsules} == {3}
    assert len({capsule.sampling.grammar for capsule in capsules} - {""}) == 1
    odd = [[{**conversation("Hi")[0], "nobody": 1}]]
    header = (await batch(api, [conversation("Hi"), *odd], other=1)).headers["x-baton-ignored-fields"]
    assert header == "other, messages[1][0].nobody"


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([], {}, "messages"),
        ([[]], {}, "messages[0]"),
        (conversation("Hi"), {}, "messages[0]"),
        ([conversation("Hi"), [{"role": "user", "content": 5}]], {}, "messages[1][0].content"),
        ([conversation("Hi")] * 1025, {}, "messages"),
        ([conversation("Hi")], {"n": 2}, "n"),
        ([conversation("Hi")], {"stream": True}, "stream"),
        ([conversation("Hi")], {"stream_options": {}}, "stream_options"),
        ([conversation("Hi")], {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ([conversation("Hi")], {"use_beam_search": True}, "use_beam_search"),
        ([conversation("Hi")], {"top_logprobs": 2}, "top_logprobs"),
        ([conversation("Hi"), conversation("much " * 3000)], {}, "messages"),
        ([[*conversation("Hi"), {"role": "assistant", "content": "a"}], conversation("Hi")],
         {"continue_final_message": True}, "continue_final_message"),
    ],
)  # fmt: skip
async def test_what_it_does_not_take_is_named(api: Api, messages: Any, fields: dict[str, Any], param: str):
    answer = await batch(api, messages, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_conversations_whose_answers_begin_apart_have_no_form_together():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n"
        "{% elif messages | length > 1 %}<think>\n{% endif %}"
    )
    async with running_api(template=template) as api:
        mixed, form = [conversation("Hi"), conversation("Hi") * 2], {"structured_outputs": {"choice": ["a"]}}
        refused = await batch(api, mixed, **form)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
        assert "cannot have one form" in refused.json()["error"]["message"]
        assert (await batch(api, mixed)).status_code == 200
        assert (await batch(api, mixed[:1] * 2, **form)).status_code == 200
