"""Cohere's own client against the whole HTTP application, over a scripted generator."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import cohere
import numpy as np
import pytest
import pytest_asyncio
from cohere.core import ApiError

from services.gateway.api.generation import Failed, Overloaded
from services.protocol.frames import TokenLogprobs
from services.protocol.model_files.text_preparation import TextPreparation
from services.protocol.outcomes import FinishReason
from tests.gateway.openai.test_embeddings import deltas as embedding_deltas
from tests.gateway.openai.test_embeddings import unit
from tests.gateway.running_api import Api, running_api
from tests.gateway.scripted_generator import Script, delta_per_token, one_delta

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 20, "messages": HI}
TEXT = "Hello, 🙂 world"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for d in documents or [] %}[{{ d | tojson }}]{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
EOS = 1
WRITTEN = f"<think>\nSum them.\n</think>\n\nAdding.\n{CALL}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api(template=TEMPLATE) as running:
        running.generator.max_model_len = 2048
        running.generator.script = Script(delta_per_token(running.tokens(TEXT), cached_tokens=4))
        yield running


@pytest_asyncio.fixture
async def client(api: Api) -> AsyncIterator[cohere.AsyncClientV2]:
    async with cohere.AsyncClientV2(base_url=api.base_url, api_key="none") as client:
        yield client


def prompt_of(api: Api) -> str:
    return api.tokenizer.decode(api.generator.requests[-1].capsules[0].token_ids.tolist(), skip_special_tokens=False)


async def events_of(client: cohere.AsyncClientV2, **fields: Any) -> list[Any]:
    return [event async for event in client.chat_stream(**{**ASKED, **fields})]


async def test_a_whole_answer(api: Api, client: cohere.AsyncClientV2):
    answer = await client.chat(**ASKED)
    assert [(item.type, item.text) for item in answer.message.content] == [("text", TEXT)]
    assert (answer.message.role, answer.finish_reason, answer.message.tool_calls) == ("assistant", "MAX_TOKENS", None)
    num_prompt = len(api.tokens("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"))
    assert (answer.usage.billed_units.input_tokens, answer.usage.cached_tokens) == (num_prompt, 4)
    assert answer.usage.tokens.output_tokens == len(api.tokens(TEXT))


async def test_a_stream_is_the_same_answer(client: cohere.AsyncClientV2):
    first, begun, *pieces, ended, last = await events_of(client)
    assert (first.type, first.delta.message.role) == ("message-start", "assistant")
    assert (begun.type, begun.index, begun.delta.message.content.type) == ("content-start", 0, "text")
    assert {piece.type for piece in pieces} == {"content-delta"}
    assert len(pieces) > 3
    assert "".join(piece.delta.message.content.text for piece in pieces) == TEXT
    assert (ended.type, ended.index, last.type, last.delta.finish_reason) == (
        "content-end",
        0,
        "message-end",
        "MAX_TOKENS",
    )
    assert last.delta.usage == (await client.chat(**ASKED)).usage


async def test_the_client_without_asyncio(api: Api):
    def ask() -> tuple[str, str]:
        with cohere.ClientV2(base_url=api.base_url, api_key="none") as client:
            whole = client.chat(**ASKED)
            pieces = [event for event in client.chat_stream(**ASKED) if event.type == "content-delta"]
        return whole.message.content[0].text, "".join(piece.delta.message.content.text for piece in pieces)

    assert await asyncio.to_thread(ask) == (TEXT, TEXT)


async def test_thinking_text_and_calls_whole_and_streamed(api: Api, client: cohere.AsyncClientV2):
    api.generator.script = Script(delta_per_token([*api.tokens(WRITTEN), EOS], FinishReason.STOP))
    fields: dict[str, Any] = {"tools": [TOOL], "max_tokens": 400}
    answer = await client.chat(**{**ASKED, **fields})
    thinking, text = answer.message.content
    assert (thinking.type, text.type) == ("thinking", "text")
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert answer.finish_reason == "TOOL_CALL"
    events = await events_of(client, **fields)
    kinds = [event.type for event in events]
    assert [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before] == [
        *("message-start", "content-start", "content-delta", "content-end"),
        *("content-start", "content-delta", "content-end"),
        *("tool-call-start", "tool-call-delta", "tool-call-end", "message-end"),
    ]
    pieces = [event.delta.message.content for event in events if event.type == "content-delta"]
    assert "".join(piece.thinking or "" for piece in pieces) == thinking.thinking
    assert "".join(piece.text or "" for piece in pieces) == text.text
    assert [event.index for event in events if event.type == "content-start"] == [0, 1]
    begun = next(event for event in events if event.type == "tool-call-start")
    assert (begun.index, begun.delta.message.tool_calls.function.name) == (0, "add")
    grown = [event.delta.message.tool_calls.function.arguments for event in events if event.type == "tool-call-delta"]
    assert "".join(grown) == call.function.arguments
    assert events[-1].delta.finish_reason == "TOOL_CALL"


async def test_an_answer_and_results_are_sent_back_as_they_came(api: Api, client: cohere.AsyncClientV2):
    api.generator.script = Script(delta_per_token([*api.tokens(WRITTEN), EOS], FinishReason.STOP))
    answer = await client.chat(**{**ASKED, "tools": [TOOL], "max_tokens": 400})
    (call,) = answer.message.tool_calls
    results = [{"type": "document", "document": {"id": "1", "data": {"sum": 1}}}, {"type": "text", "text": "Done."}]
    earlier = {"role": "assistant", "tool_plan": "I will add.", "tool_calls": [{**call.model_dump(), "id": "c2"}]}
    turns: Any = [
        *HI,
        answer.message,
        {"role": "tool", "tool_call_id": call.id, "content": results},
        earlier,
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
    ]
    await client.chat(model="m", messages=turns, tools=[TOOL], max_tokens=400)
    prompt = prompt_of(api)
    assert "<think>Sum them.</think>Adding." in prompt
    assert prompt.count('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>') == 2
    assert '<|im_start|>tool\n{"sum":1}\nDone.<|im_end|>' in prompt
    assert "<|im_start|>assistant\nI will add.<tool_call>" in prompt


async def test_every_parameter_arrives(api: Api, client: cohere.AsyncClientV2):
    await client.chat(
        **ASKED,
        temperature=0.3,
        p=0.9,
        k=7,
        seed=5,
        frequency_penalty=0.4,
        presence_penalty=0.6,
        stop_sequences=["zzz"],
        priority=3,
        documents=["One.", {"id": "d2", "data": {"title": "Two"}}],
        safety_mode="OFF",
        citation_options={"mode": "OFF"},
    )
    capsule = api.generator.requests[-1].capsules[0]
    sampling = capsule.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.3, 0.9, 7, 5)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.max_tokens) == (0.4, 0.6, 20)
    assert capsule.priority == 3
    assert prompt_of(api).startswith('[{"text": "One."}][{"title": "Two", "id": "d2"}]')


async def test_forms_and_tools_that_must_be_called_are_held(api: Api, client: cohere.AsyncClientV2):
    await client.chat(**ASKED, response_format={"type": "json_object", "json_schema": SCHEMA})
    assert '"integer"' in api.generator.requests[-1].capsules[0].sampling.grammar
    await client.chat(**ASKED, response_format={"type": "json_object"})
    assert api.generator.requests[-1].capsules[0].sampling.grammar
    await client.chat(**ASKED, response_format={"type": "text"})
    assert not api.generator.requests[-1].capsules[0].sampling.grammar
    await client.chat(**ASKED, tools=[TOOL], tool_choice="REQUIRED")
    assert "add" in api.generator.requests[-1].capsules[0].sampling.grammar
    await client.chat(**ASKED, tools=[TOOL], tool_choice="NONE")
    assert "add" not in prompt_of(api)
    await client.chat(**ASKED, tools=[TOOL], strict_tools=True)
    assert api.generator.requests[-1].capsules[0].sampling.grammar


async def test_more_tokens_than_there_is_room_for_are_cut(api: Api, client: cohere.AsyncClientV2):
    await client.chat(**{**ASKED, "max_tokens": 100_000})
    capsule = api.generator.requests[-1].capsules[0]
    assert capsule.sampling.max_tokens == 2048 - len(capsule.token_ids)


async def test_the_stop_sequence_that_ended_an_answer(client: cohere.AsyncClientV2):
    answer = await client.chat(**ASKED, stop_sequences=["world"])
    assert answer.finish_reason == "STOP_SEQUENCE"
    events = await events_of(client, stop_sequences=["world"])
    assert events[-1].delta.finish_reason == "STOP_SEQUENCE"


async def test_logprobs_are_those_of_the_text(api: Api, client: cohere.AsyncClientV2):
    tokens = [*api.tokens(TEXT), EOS]
    logprobs = [TokenLogprobs(-0.25 * number, ()) for number in range(len(tokens))]
    api.generator.script = Script(delta_per_token(tokens, FinishReason.STOP, logprobs=logprobs))
    answer = await client.chat(**ASKED, logprobs=True)
    items = answer.logprobs
    assert [token for item in items for token in item.token_ids] == tokens
    assert [value for item in items for value in item.logprobs] == [entry.sampled for entry in logprobs]
    assert "".join(item.text for item in items) == TEXT
    assert all(len(item.token_ids) == 4 for item in items if item.text == "🙂")
    streamed = [event.logprobs for event in await events_of(client, logprobs=True) if event.type == "content-delta"]
    assert streamed == items
    assert (await client.chat(**ASKED)).logprobs is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "'messages'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0]",
        ),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
        ({"k": -5}, "'k'"),
        ({"p": 2}, "'p'"),
        ({"temperature": 9}, "'temperature'"),
        ({"stop_sequences": [""]}, "'stop_sequences'"),
        ({"seed": 2**70}, "'seed'"),
        ({"tool_choice": "REQUIRED"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b", "parameters": {}}}]}, "tools[0].function.name"),
        ({"response_format": {"type": "text", "json_schema": SCHEMA}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"type": "x"}}}, "response_format"),
        ({"citation_options": {"mode": "FAST"}}, "citation_options"),
        ({"safety_mode": "STRICT"}, "safety_mode"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named_as_it_is_called_here(
    client: cohere.AsyncClientV2, fields: dict[str, Any], words: str
):
    with pytest.raises(cohere.BadRequestError) as caught:
        await client.chat(**{**ASKED, **fields})
    assert caught.value.body.keys() == {"id", "message"}
    assert words in caught.value.body["message"]
    assert not any(other in caught.value.body["message"] for other in ("top_k", "top_p", "'stop'"))


async def test_other_errors_have_their_statuses(api: Api, client: cohere.AsyncClientV2):
    with pytest.raises(cohere.NotFoundError):
        await client.chat(**{**ASKED, "model": "other"})
    once: Any = {"max_retries": 0}
    api.generator.error = Overloaded("full", 7)
    with pytest.raises(cohere.TooManyRequestsError):
        await client.chat(**ASKED, request_options=once)
    api.generator.error = Failed("broken")
    with pytest.raises(ApiError) as caught:
        await client.chat(**ASKED, request_options=once)
    assert caught.value.status_code == 500


async def test_an_error_after_the_first_event_is_in_the_last_one(api: Api, client: cohere.AsyncClientV2):
    api.generator.script = Script(delta_per_token(api.tokens(TEXT))[:3], error=Failed("broken"))
    events = await events_of(client)
    assert (events[-1].type, events[-1].delta.finish_reason) == ("message-end", "ERROR")
    assert "failed to answer" in events[-1].delta.error
    assert events[0].type == "message-start"


async def test_hints_are_named_and_strict_servers_refuse_them(api: Api):
    body = {
        **ASKED,
        "messages": [*HI, {"role": "assistant", "content": "x", "citations": [{"start": 0}]}, *HI],
        "thinking": {"type": "enabled", "token_budget": "much"},
        "nobody": 1,
    }
    answer = await api.http.post("/v2/chat", json=body)
    assert answer.status_code == 200, answer.text
    named = answer.headers["x-baton-ignored-fields"].split(", ")
    assert {"nobody", "messages[1].citations", "thinking.token_budget"} <= {*named}
    async with running_api(strict_fields=True) as strict:
        refused = await strict.http.post("/v2/chat", json=body)
        assert (refused.status_code, refused.json().keys()) == (400, {"id", "message"})


VECTOR = [3.0, -4.0, 0.0, 12.0, -0.1, -0.2, 0.5, 0.25]


async def test_vectors_come_in_every_type(api: Api, client: cohere.AsyncClientV2):
    api.generator.embedding_size = 8
    api.generator.script = embedding_deltas(VECTOR, [-value for value in VECTOR])
    types = ["float", "base64", "binary", "ubinary"]
    answer = await client.embed(model="m", texts=["a", "bc"], input_type="search_document", embedding_types=types)
    found = answer.embeddings
    expected = [unit(VECTOR), [-value for value in unit(VECTOR)]]
    assert np.allclose(found.float_, expected, atol=1e-6)
    packed = [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in found.base64]
    assert np.array_equal(np.array(packed, np.float32), np.array(found.float_, np.float32))
    assert found.ubinary == [[0b10110011], [0b01101100]]
    assert found.binary == [[0b10110011 - 128], [0b01101100 - 128]]
    assert (found.int8, found.uint8, answer.texts) == (None, None, ["a", "bc"])
    prompts = [capsule.token_ids for capsule in api.generator.requests[-1].capsules]
    assert answer.meta.api_version.version == "2"
    assert answer.meta.billed_units.input_tokens == sum(map(len, prompts))


async def test_floats_come_by_default_and_can_be_fewer(api: Api, client: cohere.AsyncClientV2):
    api.generator.script = embedding_deltas([3.0, 4.0, 0.0, 0.0])
    answer = await client.embed(model="m", texts=["a"], input_type="search_query", output_dimension=2)
    assert answer.embeddings.float_ == [pytest.approx([0.6, 0.8])]
    assert answer.embeddings.binary is None


async def test_the_texts_of_an_input_are_joined(api: Api, client: cohere.AsyncClientV2):
    api.generator.script = embedding_deltas([1.0, 0.0, 0.0, 0.0])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = await client.embed(model="m", inputs=[{"content": parts}], input_type="classification")
    assert answer.texts == ["a\nb"]
    assert api.generator.requests[-1].capsules[0].token_ids.tolist()[1:] == api.tokens("a\nb")


@pytest.mark.parametrize(("truncate", "kept"), [("START", slice(-3, None)), ("END", slice(3)), (None, slice(3))])
async def test_long_inputs_are_cut_at_the_end_that_is_named(
    api: Api, client: cohere.AsyncClientV2, truncate: str | None, kept: slice
):
    api.generator.script = embedding_deltas([1.0, 0.0, 0.0, 0.0])
    text = "one two three four five"
    options: dict[str, Any] = {} if truncate is None else {"truncate": truncate}
    await client.embed(model="m", texts=[text], input_type="clustering", max_tokens=4, **options)
    assert api.generator.requests[-1].capsules[0].token_ids.tolist()[1:] == api.tokens(text)[kept]
    api.generator.max_model_len = 16
    api.generator.script = embedding_deltas([1.0, 0.0, 0.0, 0.0])
    await client.embed(model="m", texts=["word " * 100], input_type="clustering", **options)
    assert len(api.generator.requests[-1].capsules[0].token_ids) == 16
    with pytest.raises(cohere.BadRequestError) as caught:
        await client.embed(model="m", texts=["word " * 100], input_type="clustering", truncate="NONE")
    assert "texts" in caught.value.body["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": [""]}, "texts"),
        ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "inputs"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "models read text"),
        ({"images": ["data:image/png;base64,x"]}, "images"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0]"),
        ({"texts": ["a"], "embedding_types": ["uint8"]}, "embedding_types[0]"),
        ({"texts": ["a"], "output_dimension": 5}, "output_dimension"),
        ({"texts": ["a"], "output_dimension": 3, "embedding_types": ["binary"]}, "output_dimension"),
        ({"texts": ["a"], "embedding_types": ["ubinary"]}, "embedding_types"),  # of four numbers
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ({"texts": ["a"], "truncate": "NONE", "max_tokens": 5}, "max_tokens"),
        ({"texts": ["a"], "max_tokens": 5000}, "max_tokens"),
    ],
    ids=str,
)
async def test_a_wrong_request_for_vectors_is_refused_in_words(
    api: Api, client: cohere.AsyncClientV2, fields: dict[str, Any], words: str
):
    api.generator.script = embedding_deltas([1.0, 0.0, 0.0, 0.0])
    with pytest.raises(cohere.BadRequestError) as caught:
        await client.embed(model="m", input_type="search_query", **fields)
    assert words in caught.value.body["message"]


async def test_what_an_input_is_for_is_named_as_a_hint(api: Api):
    api.generator.script = embedding_deltas([1.0, 0.0, 0.0, 0.0])
    answer = await api.http.post("/v2/embed", json={"texts": ["a"], "input_type": "search_query", "nobody": 1})
    assert {*answer.headers["x-baton-ignored-fields"].split(", ")} == {"input_type", "nobody"}
    async with running_api(strict_fields=True) as strict:
        refused = await strict.http.post("/v2/embed", json={"texts": ["a"], "input_type": "search_query"})
        assert "have no prompt for it" in refused.json()["message"]


PROMPTS = {"query": "Q: ", "passage": "P: ", "Clustering": "C: ", "all": "A: "}


@pytest.mark.parametrize("default", [None, "all"])
async def test_what_an_input_is_for_chooses_the_model_s_prompt(default: str | None):
    """And every other text gets that which the model has for all."""
    texts = TextPreparation(PROMPTS, default)
    async with (
        running_api(strict_fields=True, texts=texts) as api,
        cohere.AsyncClientV2(base_url=api.base_url, api_key="none") as client,
    ):
        for input_type, prompt in (("search_query", "Q: "), ("search_document", "P: "), ("clustering", "C: ")):
            api.generator.script = embedding_deltas([1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0])
            answer = await client.embed(model="m", texts=["one", "two"], input_type=input_type)
            assert answer.texts == ["one", "two"]
            prompts = [capsule.token_ids.tolist()[1:] for capsule in api.generator.requests[-1].capsules]
            assert prompts == [api.tokens(f"{prompt}{text}") for text in ("one", "two")]
        with pytest.raises(cohere.BadRequestError, match="input_type"):
            await client.embed(model="m", texts=["one"], input_type="classification")
        ids = api.tokens("two")
        before = "" if default is None else "A: "
        for path, fields in (("/v1/embeddings", {"input": ["one", ids]}), ("/v2/embed", {"texts": ["one"]})):
            api.generator.script = embedding_deltas(*[[1.0, 0.0, 0.0, 0.0]] * (2 if "input" in fields else 1))
            assert (await api.http.post(path, json=fields)).status_code == 200
            first, *others = [capsule.token_ids.tolist() for capsule in api.generator.requests[-1].capsules]
            assert first[1:] == api.tokens(f"{before}one")
            assert others in ([ids], [])


async def test_many_tokens_in_one_update_are_one_piece(api: Api, client: cohere.AsyncClientV2):
    api.generator.script = Script(one_delta(api.tokens(TEXT), FinishReason.STOP))
    kinds = [event.type for event in await events_of(client)]
    assert kinds == ["message-start", "content-start", "content-delta", "content-end", "message-end"]
