"""/openapi.json says what is accepted and answered: requests are drawn from it, and every answer is held to it."""

import json
import re
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
import jsonschema  # type: ignore[import-untyped]
import pytest
import pytest_asyncio
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.requests.hints import Hinting
from services.gateway.api.requests.strict import Strict
from services.gateway.http.operation import DescribedRoute, Operation
from services.gateway.openai import docs_page
from services.gateway.openai.docs_page import SCRIPT, STYLE
from services.gateway.openai.openapi import describe_api
from services.gateway.openai.responses.store import MemoryResponseStore
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FinishReason
from tests.gateway.api_thread import api_in_thread
from tests.gateway.openai.test_embeddings import deltas as embedding_deltas
from tests.gateway.running_api import MODEL, Api, events, running_api
from tests.gateway.scripted_generator import Script, delta_per_token
from tests.seeds import first_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

INFO = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": None, "bos_token": "<|bos|>"}
# Of swagger-ui-dist 5.31.0, as its authors publish it.
OFFICIAL = (
    (STYLE, "text/css", "9e576f8322132c76949da47f9bb53c891373c303ea3a761ff548ffc9de50a98c"),
    (SCRIPT, "text/javascript", "93b7b0862a80e2786f85b560be7693c2344354ffa7e7e224f850a54349724c31"),
)
API = Path(__file__).parents[3] / "docs/api.md"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
WRITTEN = f"<think>\nSum them.\n</think>\n\nAdding.\n{CALL}"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
# Schemathesis holds each event to the schema of the whole stream. The fields of events have tests of their own.
CHECKS_OF_STREAMS = [check for check in CHECKS if check is not checks.response_schema_conformance]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api(tokenizer_info=INFO, response_store=MemoryResponseStore(60, time.monotonic)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def document(api: Api) -> dict[str, Any]:
    described: dict[str, Any] = (await api.http.get("/openapi.json")).json()
    return described


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with api_in_thread(tokenizer_info=INFO, response_store=MemoryResponseStore(60, time.monotonic)) as (port, _):
        yield f"http://127.0.0.1:{port}"


def valid(document: dict[str, Any], model: str, value: Any) -> bool:
    """True for a value that a schema of the document describes."""
    root = {"$ref": f"#/components/schemas/{model}", "components": document["components"]}
    return bool(jsonschema.Draft202012Validator(root).is_valid(value))


async def test_it_is_a_document_of_openapi_3_1(document: dict[str, Any]):
    assert document["openapi"] == "3.1.0"
    schemathesis.openapi.from_dict(document).validate()
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_every_endpoint_is_in_it_and_in_the_table_for_people(document: dict[str, Any]):
    section = API.read_text().partition("## Endpoints")[2].partition("Workers serve gRPC alone")[0]
    first_cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    listed = {path.replace("/NAME", "/ID") for cell in first_cells for path in re.findall(r"`([^`]+)`", cell)}
    described = {re.sub(r"{\w+}", "ID", path) for path in document["paths"]}
    assert listed == described


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("third", first_of(1, range(3)))  # of the operations
async def test_every_answer_to_requests_drawn_from_it_is_one_that_it_describes(
    base_url: str, document: dict[str, Any], mode: GenerationMode, third: int
):
    """What it refuses is refused, and the answers have the statuses, headers and fields that it says."""
    schema = schemathesis.openapi.from_dict(document)
    rejection = schema.config.checks.negative_data_rejection
    rejection.expected_statuses = [*rejection.expected_statuses, "413"]  # some of what is drawn is larger than a body
    statuses = set()
    for result in islice(schema.get_all_operations(), third, None, 3):
        operation: Any = result.ok()  # type: ignore[union-attr]  # an Err would fail here
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue

        @seed(1)
        @settings(
            max_examples=5 if mode is GenerationMode.POSITIVE else 3,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def answers(case: schemathesis.Case) -> None:
            response = case.call(base_url=base_url)
            statuses.add(response.status_code)
            is_stream = response.headers["content-type"][0].startswith("text/event-stream")
            case.validate_response(response, checks=CHECKS_OF_STREAMS if is_stream else CHECKS)

        answers()
    assert 400 in statuses
    assert (200 in statuses) == (mode is GenerationMode.POSITIVE)


async def test_chats_and_their_chunks_have_the_fields_that_it_says(api: Api, document: dict[str, Any]):
    tokens = api.tokens("größer 日本")
    logprobs = [TokenLogprobs(-0.5, ((5, -0.5), (6, -1.0))) for _ in tokens]
    api.generator.script = Script(delta_per_token(tokens, logprobs=logprobs))
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "n": 2}
    assert valid(document, "ChatCompletion", (await api.chat(**fields)).json())
    streamed = await api.chat(**fields, stream=True, stream_options={"include_usage": True})
    assert [event for event in events(streamed)[:-1] if not valid(document, "ChatCompletionChunk", event)] == []
    api.generator.script = Script(delta_per_token(tokens))
    assert valid(document, "ChatCompletion", (await api.chat()).json())
    assert [event for event in events(await api.chat(stream=True))[:-1] if "usage" in event] == []


async def test_completions_and_their_chunks_have_the_fields_that_it_says(api: Api, document: dict[str, Any]):
    tokens = api.tokens("größer 日本")
    logprobs = [TokenLogprobs(-0.5, ((5, -0.5), (6, -1.0))) for _ in tokens]
    api.generator.script = Script(delta_per_token(tokens, logprobs=logprobs))
    assert valid(document, "Completion", (await api.complete(logprobs=2)).json())
    streamed = await api.complete(logprobs=2, stream=True, stream_options={"include_usage": True})
    assert [event for event in events(streamed)[:-1] if not valid(document, "CompletionChunk", event)] == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tools_api() -> AsyncIterator[Api]:
    """Whatever is asked, the model thinks, speaks and calls a tool."""
    async with running_api(template=TEMPLATE, response_store=MemoryResponseStore(60, time.monotonic)) as running:
        running.generator.script = Script(delta_per_token([*running.tokens(WRITTEN), 1], FinishReason.STOP))
        yield running


def data_of(response: httpx2.Response) -> list[Any]:
    """The data of each server-sent event that has a name."""
    return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data: ")]


async def test_chats_with_tools_and_reasoning_have_the_fields_that_it_says(tools_api: Api, document: dict[str, Any]):
    fields: dict[str, Any] = {"tools": [TOOL], "return_token_ids": True}
    whole = (await tools_api.chat(**fields)).json()
    message = whole["choices"][0]["message"]
    assert all(message[name] for name in ("tool_calls", "reasoning", "content"))
    assert valid(document, "ChatCompletion", whole)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await tools_api.chat(**fields, stream=True, stream_options=usage))[:-1]
    assert [chunk for chunk in chunks if not valid(document, "ChatCompletionChunk", chunk)] == []


async def test_responses_and_their_events_have_the_fields_that_it_says(tools_api: Api, document: dict[str, Any]):
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    asked = {"input": "Hi", "tools": [tool], "text": {"format": {"type": "text"}}}
    whole = (await tools_api.http.post("/v1/responses", json=asked)).json()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert valid(document, "Response", whole)
    streamed = data_of(await tools_api.http.post("/v1/responses", json={**asked, "stream": True}))
    assert [event for event in streamed if not valid(document, "ResponseEvent", event)] == []
    output = {"type": "function_call_output", "call_id": whole["output"][-1]["call_id"], "output": "sun"}
    turn = {"input": [output], "previous_response_id": whole["id"], "tools": [tool]}
    second = (await tools_api.http.post("/v1/responses", json=turn)).json()
    path = f"/v1/responses/{second['id']}"
    assert valid(document, "Response", (await tools_api.http.get(path)).json())
    listed = (await tools_api.http.get(f"{path}/input_items?limit=100")).json()
    assert len(listed["data"]) == 5
    assert valid(document, "InputItemList", listed)
    refused = await tools_api.http.post(f"{path}/cancel")
    assert refused.status_code == 400
    assert valid(document, "ErrorAnswer", refused.json())
    assert valid(document, "DeletedResponse", (await tools_api.http.delete(path)).json())


async def test_messages_and_their_events_have_the_fields_that_it_says(tools_api: Api, document: dict[str, Any]):
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 100,
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    }
    whole = (await tools_api.http.post("/v1/messages", json=asked)).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert valid(document, "AnswerMessage", whole)
    streamed = data_of(await tools_api.http.post("/v1/messages", json={**asked, "stream": True}))
    assert [event for event in streamed if not valid(document, "MessageEvent", event)] == []
    refused = await tools_api.http.post("/v1/messages", json={**asked, "max_tokens": 0})
    assert refused.status_code == 400
    assert valid(document, "MessagesError", refused.json())


async def test_cohere_s_answers_and_events_have_the_fields_that_it_says(tools_api: Api, document: dict[str, Any]):
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, "tools": [TOOL]}
    whole = (await tools_api.http.post("/v2/chat", json=asked)).json()
    assert [item["type"] for item in whole["message"]["content"]] == ["thinking", "text"]
    assert whole["message"]["tool_calls"]
    assert valid(document, "CohereChatAnswer", whole)
    streamed = data_of(await tools_api.http.post("/v2/chat", json={**asked, "stream": True}))
    assert [event for event in streamed if not valid(document, "ChatEvent", event)] == []
    refused = await tools_api.http.post("/v2/chat", json={**asked, "max_tokens": 0})
    assert refused.status_code == 400
    assert valid(document, "CohereError", refused.json())
    chats, tools_api.generator.script = tools_api.generator.script, embedding_deltas([1.0, -1.0] * 4)
    types = {"texts": ["a"], "embedding_types": ["float", "base64", "binary", "ubinary"]}
    vectors = (await tools_api.http.post("/v2/embed", json=types)).json()
    tools_api.generator.script = chats
    assert len(vectors["embeddings"]) == 4
    assert valid(document, "EmbedAnswer", vectors)


async def test_strings_and_lists_are_both_in_it_where_a_field_takes_both(document: dict[str, Any]):
    turn = [{"role": "user", "content": "Hi"}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("ResponsesRequest", {"input": "Hi", "tool_choice": "auto"}),
        ("ResponsesRequest", {"input": turn, "tool_choice": {"type": "function", "name": "f"}}),
        ("MessagesRequest", {"messages": turn, "max_tokens": 5, "system": "Hi"}),
        ("MessagesRequest", {"messages": turn, "max_tokens": 5, "system": [{"type": "text", "text": "Hi"}]}),
        ("EmbeddingRequest", {"input": "Hi"}),
        ("EmbeddingRequest", {"input": [[5, 6], "Hi"]}),
    ]
    assert [(name, body) for name, body in bodies if not valid(document, name, body)] == []
    renamed = {"input": "Hi", "max_tokens": 5}
    assert not valid(document, "ResponsesRequest", renamed)


async def test_limits_and_forms_of_fields_are_those_of_the_checks(document: dict[str, Any]):
    properties = document["components"]["schemas"]["ChatRequest"]["properties"]
    fields: list[tuple[str, list[Any], list[Any]]] = [
        ("temperature", [0, 1.5, None], [2.1, -1, "1", True]),
        ("stop", ["a", ["a"] * 64, [], None], ["", ["a"] * 65, [""], 5]),
        ("logit_bias", [{"5": 100}, {}, None], [{"a": 1}, {"5": 101}, [[5, 1]], {"5": "1"}]),
        ("max_tokens", [0, 1, 5.0, None], [-1, 1.5, "1"]),
        ("messages", [[{"role": "x", "content": "y", "nobody": 1}]], [[], None, [{}], [{"role": 5}], [5]]),
        ("truncate_prompt_tokens", [-1, 1, 5.0, None], [0, -2, 1.5]),
        ("session_id", ["a:1", None], ["", "a b", "a" * 129, 5]),
        ("store", [False, None, True, 0], []),  # a hint
        ("use_beam_search", [False, None], [True, 0]),
        ("kv_transfer_params", [None], [{}]),
    ]
    for name, right, wrong in fields:
        root = {**properties[name], "components": document["components"]}
        check = jsonschema.Draft202012Validator(root).is_valid
        assert [value for value in right if not check(value)] == [], name
        assert [value for value in wrong if check(value)] == [], name


async def test_strict_fields_are_strict_in_it_too(document: dict[str, Any]):
    body = {"messages": [{"role": "user", "content": "Hi"}], "nobody": 1}
    inner = {"messages": [{"role": "user", "content": "Hi", "nobody": 1}]}
    assert valid(document, "ChatRequest", body)
    async with running_api(strict_fields=True) as strict:
        described = (await strict.http.get("/openapi.json")).json()
        for each in (body, inner):
            assert not valid(described, "ChatRequest", each)
            assert (await strict.http.post("/v1/chat/completions", json=each)).status_code == 400
        assert "/tokenizer_info" not in described["paths"]


async def test_it_lets_every_value_of_a_hint_pass_as_the_requests_do_and_none_where_fields_are_strict(api: Api):
    body = {
        "messages": [{"role": "user", "content": "Hi", "reasoning_content": 1}],
        "thinking": {"type": "disabled", "token_budget": -1},
    }
    message = {**body, "max_tokens": 1, "metadata": 5, "thinking": {"type": "enabled", "budget_tokens": {}}}
    async with running_api(strict_fields=True) as strict:
        for tried, status in ((api, 200), (strict, 400)):
            described = (await tried.http.get("/openapi.json")).json()
            for path, sent in (("/v2/chat", body), ("/v1/messages", message)):
                content = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
                name = content["schema"]["$ref"].rpartition("/")[2]
                answer = await tried.http.post(path, json=sent)
                assert (answer.status_code, valid(described, name, sent)) == (status, status == 200), path


def _hinting(kind: type[Hinting] = Hinting) -> Iterator[type[Hinting]]:
    for each in kind.__subclasses__():
        yield each
        yield from _hinting(each)


@pytest.mark.parametrize("kind", [*_hinting()])
async def test_the_schema_of_a_hint_takes_every_value(kind: type[Hinting]):
    schema = kind.model_json_schema()
    for name in kind.hints & schema["properties"].keys():
        field = jsonschema.Draft202012Validator({"$defs": schema.get("$defs", {}), **schema["properties"][name]})
        values: tuple[object, ...] = (-(10**30), 0.5, "[]", [{}], {"x": None}, False, None)
        assert all(field.is_valid(value) for value in values), name


async def test_models_of_one_name_are_told_apart():
    class Message(Strict):
        """Another one than a chat's."""

        own: int

    operation = Operation(summary="x", bodies={Message: {}, ChatRequest: {}})
    document = describe_api([DescribedRoute("/x", "POST", operation)], 100, strict_fields=False)
    own, chat = document["paths"]["/x"]["post"]["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
    schemas = document["components"]["schemas"]
    assert [*schemas[own["$ref"].rpartition("/")[2]]["properties"]] == ["own"]
    assert "messages" in schemas[chat["$ref"].rpartition("/")[2]]["properties"]


async def test_every_operation_has_a_group_and_a_body_an_example_that_is_answered(api: Api, document: dict[str, Any]):
    vectors = embedding_deltas([1.0, 0.0], [0.0, 1.0])
    three_vectors = embedding_deltas([1.0, 0.0], [0.0, 1.0], [0.6, 0.8])
    groups = {tag["name"] for tag in document["tags"]}
    used = set()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            (tag,) = operation["tags"]
            used.add(tag)
            assert all("example" in each for each in operation["parameters"] if each["in"] == "path"), path
            if "requestBody" in operation:
                example = operation["requestBody"]["content"]["application/json"]["example"]
                embeds = path in ("/v1/embeddings", "/pooling", "/v2/embed")
                scores = path.endswith(("/rerank", "/score"))
                words = Script(delta_per_token(api.tokens("Hi")))
                api.generator.script = vectors if embeds else three_vectors if scores else words
                assert (await api.http.post(path, json=example)).status_code == 200, path
    assert used == groups
    assert (await api.http.get(f"/v1/models/{MODEL}")).status_code == 200
    assert document["paths"]["/v1/models/{model}"]["get"]["parameters"][0]["example"] == MODEL


async def test_the_page_is_swagger_ui_s_and_asks_no_other_server(api: Api):
    response = await api.http.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    loaded = re.findall(r"(?:src|href|url)(?:=|: )\"([^\"]*)", response.text)
    assert loaded == ["data:,", f"docs/{STYLE}", f"docs/{SCRIPT}", "openapi.json"]
    assert (await api.http.get("/docs/nothing.js")).status_code == 404
    for name, media_type, digest in OFFICIAL:
        file = await api.http.get(f"/docs/{name}")
        assert file.headers["content-type"] == f"{media_type}; charset=utf-8"
        assert sha256(file.content).hexdigest() == digest


async def test_the_page_may_use_its_own_styles_and_scripts_and_nothing_else(api: Api):
    response = await api.http.get("/docs")
    policy = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    for element in ("script", "style"):
        texts = re.findall(f"<{element}>(.*?)</{element}>", response.text, re.DOTALL)
        hashes = [b64encode(sha256(text.encode()).digest()).decode() for text in texts]
        assert len(hashes) == 1
        assert policy[f"{element}-src"] == f"'self' 'sha256-{hashes[0]}'"
    assert "http" not in " ".join(policy.values())
    assert re.findall(r"\s(?:on[a-z]+|style)=|javascript:", response.text) == []


async def test_without_swagger_ui_the_page_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(docs_page, "_PACKAGE", "no_such_package")
    async with running_api() as api:
        response = await api.http.get("/docs")
        assert response.status_code == 200
        assert f"<code>{docs_page.INSTALL}</code>" in response.text
        document = (await api.http.get("/openapi.json")).json()
        assert [path for path in document["paths"] if path.startswith("/docs")] == ["/docs"]
        assert (await api.http.get(f"/docs/{SCRIPT}")).status_code == 404


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/health", "/v1/models", "/nothing", "/v1/completions"])
async def test_no_answer_s_type_is_guessed(api: Api, path: str):
    assert (await api.http.get(path)).headers["x-content-type-options"] == "nosniff"


async def test_what_a_model_says_of_its_tokenizer_is_shown_where_that_is_asked_for(api: Api):
    assert (await api.http.get("/tokenizer_info")).json() == INFO
    async with running_api() as closed:
        assert (await closed.http.get("/tokenizer_info")).status_code == 404


async def rendered(api: Api, path: str, **fields: Any) -> httpx2.Response:
    return await api.http.post(f"/v1/{path}/render", json=fields)


async def test_render_shows_what_a_worker_would_be_sent_and_generates_nothing(api: Api):
    messages = [{"role": "user", "content": "größer"}]
    fields = {"messages": messages, "n": 2, "temperature": 0.5, "stop": "x", "logit_bias": {"5": 1}, "seed": 7}
    api.generator.requests.clear()
    shown = (await rendered(api, "chat/completions", **fields)).json()
    assert api.generator.requests == []
    await api.chat(**fields)
    capsule = api.generator.requests[0].capsules[0]
    assert shown["token_ids"] == capsule.token_ids.tolist()
    sampling = shown["sampling_params"]
    assert sampling["max_tokens"] == capsule.sampling.max_tokens
    asked = {"n": 2, "temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1.0}, "seed": 7}
    assert {name: sampling[name] for name in asked} == asked
    assert shown["request_id"].startswith("chatcmpl-")


async def test_render_of_several_prompts_is_a_list(api: Api):
    prompts = (await rendered(api, "completions", prompt=[[5, 6], [7]], max_tokens=3, n=2)).json()
    assert [prompt["token_ids"] for prompt in prompts] == [[5, 6], [7]]
    assert prompts[1]["request_id"].endswith("-1")
    (alone,) = (await rendered(api, "completions", prompt="Hi")).json()
    assert alone["token_ids"][1:] == api.tokens("Hi")


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}},
            {"json": {"type": "array"}},
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}},
            {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}},
        ),
        ({"response_format": {"type": "text"}}, None),
    ],
    ids=json.dumps,
)
async def test_render_shows_the_form_of_the_answer(api: Api, fields: dict[str, Any], form: Any):
    (shown,) = (await rendered(api, "completions", prompt="Hi", **fields)).json()
    assert shown["sampling_params"]["structured_outputs"] == form


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "Hi", "max_tokens": 10**6}, "prompt"),
        ({"prompt": "Hi", "structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"prompt": "Hi", "suffix": "x"}, "suffix"),
    ],
)
async def test_render_refuses_what_the_endpoint_refuses(api: Api, fields: dict[str, Any], param: str):
    for path in ("/v1/completions/render", "/v1/completions"):
        response = await api.http.post(path, json=fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
