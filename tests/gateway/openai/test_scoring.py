"""POST /v1/rerank and /v1/score: what clients send, what workers are asked, and what clients get."""

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import numpy as np
import pytest
import pytest_asyncio
from cohere import AsyncClientV2

from services.config import Pooling
from services.gateway.api.dialects.scoring import MAX_TEXTS
from services.gateway.api.generation import Overloaded
from services.gateway.openai.neutral import SCORES_NEUTRAL
from services.protocol.model_files.cross_encoder import CrossEncoder, PairForm
from tests.gateway.openai.test_embeddings import bos, deltas
from tests.gateway.running_api import MODEL, Api, running_api
from tests.gateway.scripted_generator import Script

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERY, FAR, NEAR, OPPOSITE = [2.0, 0.0, 0.0], [1.0, 2.0, 2.0], [4.0, 3.0, 0.0], [-1.0, 0.0, 0.0]
COSINES = [1 / 3, 0.8, -1.0]
RANKED: dict[str, Any] = {"query": "q", "documents": ["far", "near", "opposite"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Api]:
    async with running_api() as api:
        yield api


@pytest.fixture
def api(running: Api) -> Api:
    running.generator.script = deltas(QUERY, FAR, NEAR, OPPOSITE)
    running.generator.requests.clear()
    return running


async def post(api: Api, path: str = "/v1/rerank", **fields: Any) -> httpx2.Response:
    return await api.http.post(path, json=fields)


def refusal(response: httpx2.Response) -> tuple[str, str]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_come_the_best_first_by_the_cosine_to_the_query(api: Api, path: str):
    """Form and names as vLLM's RerankResponse has them."""
    answer = (await post(api, path, **RANKED, model=MODEL, request_id="mine")).json()
    assert (answer["id"], answer["model"]) == ("rerank-mine", MODEL)
    assert [result["index"] for result in answer["results"]] == [1, 0, 2]
    assert [result["document"]["text"] for result in answer["results"]] == ["near", "far", "opposite"]
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx([0.8, 1 / 3, -1.0], abs=1e-7)
    (request,) = api.generator.requests
    prompts = [capsule.token_ids.tolist() for capsule in request.capsules]
    assert prompts == [[bos(api), *api.tokens(text)] for text in ("q", "far", "near", "opposite")]
    assert {capsule.pooling for capsule in request.capsules} == {Pooling.LAST}
    assert answer["usage"] == dict.fromkeys(("prompt_tokens", "total_tokens"), sum(map(len, prompts)))


async def test_the_client_says_how_many_results_it_wants_and_whether_with_documents(api: Api):
    for top_n, number in ((1, 1), (2, 2), (0, 3), (None, 3), (9, 3), (2.0, 2)):
        assert len((await post(api, **RANKED, top_n=top_n)).json()["results"]) == number
    results = (await post(api, **RANKED, return_documents=False)).json()["results"]
    assert [sorted(result) for result in results] == [["index", "relevance_score"]] * 3


async def test_of_equal_documents_the_first_comes_first(api: Api):
    api.generator.script = deltas(QUERY, FAR, NEAR, FAR, NEAR)
    results = (await post(api, query="q", documents=["a", "b", "c", "d"])).json()["results"]
    assert [result["index"] for result in results] == [1, 3, 0, 2]


async def test_documents_may_be_objects_with_a_text(api: Api):
    await post(api, query={"text": "q"}, documents=[{"text": "far"}, "near", {"text": "opposite", "title": "x"}])
    plain = [capsule.token_ids.tolist() for capsule in api.generator.requests[0].capsules]
    answer = await post(api, **RANKED)
    assert plain == [capsule.token_ids.tolist() for capsule in api.generator.requests[1].capsules]
    assert "x-baton-ignored-fields" not in answer.headers


async def test_cohere_s_client_reads_the_answer(api: Api):
    async with AsyncClientV2(base_url=api.base_url, api_key="none") as client:
        answer = await client.rerank(model=MODEL, query="q", documents=RANKED["documents"], top_n=2)
    assert [(each.index, round(each.relevance_score, 3)) for each in answer.results] == [(1, 0.8), (0, 0.333)]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents")])
async def test_one_text_is_scored_with_each_of_several(api: Api, path: str, names: tuple[str, str]):
    """Form and names as vLLM's ScoreResponse has them."""
    answer = (await post(api, path, **dict(zip(names, ("q", RANKED["documents"]), strict=True)))).json()
    assert (answer["object"], answer["model"], answer["id"][:6]) == ("list", MODEL, "score-")
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(index, "score") for index in range(3)]
    assert [each["score"] for each in answer["data"]] == pytest.approx(COSINES, abs=1e-7)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 4


async def test_texts_are_scored_pair_by_pair(api: Api):
    api.generator.script = deltas(QUERY, NEAR, OPPOSITE, NEAR)
    pairs = (await post(api, "/score", text_1=["a", "b"], text_2=["c", "d"])).json()["data"]
    assert [each["score"] for each in pairs] == pytest.approx([-1.0, 1.0], abs=1e-7)
    api.generator.script = deltas(QUERY, NEAR)
    (one,) = (await post(api, "/score", text_1="a", text_2="c")).json()["data"]
    assert one["score"] == pytest.approx(0.8, abs=1e-7)


async def test_a_vector_of_zeros_scores_zero(api: Api):
    api.generator.script = deltas([0.0] * 3, NEAR)
    (one,) = (await post(api, "/score", text_1="a", text_2="c")).json()["data"]
    assert one["score"] == 0.0


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "q"}, "documents"),
        ("/rerank", {"query": "q", "documents": []}, "documents"),
        ("/rerank", {**RANKED, "top_n": -1}, "top_n"),
        ("/rerank", {**RANKED, "max_tokens_per_doc": 7}, "max_tokens_per_doc"),
        ("/rerank", {**RANKED, "use_activation": False}, "use_activation"),
        ("/rerank", {**RANKED, "truncation_side": "left"}, "truncation_side"),
        ("/rerank", {"query": "q", "documents": ["a"] * (MAX_TEXTS + 1)}, "documents"),
        ("/score", {}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"documents": ["a"]}, "queries"),
        ("/score", {"text_1": "a", "data_2": "b"}, "data_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_2"),
    ],
)
async def test_what_is_wrong_is_named(api: Api, path: str, fields: dict[str, Any], param: str):
    assert refusal(await post(api, path, **fields))[0] == param
    assert api.generator.requests == []


async def test_a_text_that_is_too_long_is_named_by_its_place(api: Api):
    for text in ("long " * 300, "long " * 30_000):  # one is tokenized, the other is too long for that
        param, words = refusal(await post(api, query="q", documents=["a", text]))
        assert param == "documents[1]"
        assert "tokens" in words
        assert refusal(await post(api, query=text, documents=["a"]))[0] == "query"
        assert refusal(await post(api, "/score", text_1=["a"], text_2=text))[0] == "text_2"
    await post(api, query="q", documents=["a", "long " * 300, "b"], truncate_prompt_tokens=5)
    assert [len(capsule.token_ids) for capsule in api.generator.requests[-1].capsules][2] == 5


async def test_defaults_of_clients_are_taken_and_unknown_fields_named(api: Api):
    neutral: dict[str, Any] = {name: values[0] if values else None for name, values in SCORES_NEUTRAL.items()}
    answer = await post(api, **RANKED, **neutral, user="me", priority=0, cache_salt=None)
    assert (answer.status_code, "x-baton-ignored-fields" in answer.headers) == (200, False)
    answer = await post(api, **RANKED, rank_fields=["text"])
    assert answer.headers["x-baton-ignored-fields"] == "rank_fields"
    async with running_api(strict_fields=True) as strict:
        assert refusal(await post(strict, **RANKED, rank_fields=["text"]))[0] == "rank_fields"


async def test_a_gateway_with_too_much_to_do_says_so(api: Api):
    api.generator.script = Script([], error=Overloaded("busy"))
    assert (await post(api, **RANKED)).status_code == 429


async def test_a_request_for_scores_is_recorded_as_others_are(api: Api):
    await post(api, "/v1/score", text_1="q", text_2=RANKED["documents"], request_id="scored")
    record = (await api.admin.get("/debug/requests/scored")).json()
    assert record["endpoint"] == "score"
    assert record["prompt_tokens"] == sum(len(capsule.token_ids) for capsule in api.generator.requests[0].capsules)
    metrics = (await api.admin.get("/metrics")).text
    assert 'baton_requests_total{endpoint="score",status="200"}' in metrics


@pytest.mark.parametrize("sigmoid", [True, False])
async def test_a_cross_encoder_reads_both_texts_at_once(sigmoid: bool):
    """Its number becomes a score by the sigmoid, unless the model or the request says otherwise."""
    numbers = np.array([-2.0, 0.5, 40.0])
    expected = 1 / (1 + np.exp(-numbers)) if sigmoid else numbers
    async with running_api(cross_encoder=CrossEncoder(Pooling.MEAN, sigmoid)) as api:
        for use_activation, scores in ((None, expected), (True, expected), (False, numbers)):
            api.generator.script = deltas(*([number] for number in numbers.tolist()))
            answer = (await post(api, **RANKED, use_activation=use_activation)).json()
            assert [result["index"] for result in answer["results"]] == [2, 1, 0]
            found = [result["relevance_score"] for result in answer["results"]]
            assert found == pytest.approx(scores[::-1].tolist(), abs=1e-7)
        capsules = api.generator.requests[0].capsules
        encoded = [api.tokenizer.encode_pair(("q", text), None, from_left=False) for text in RANKED["documents"]]
        pairs = [pair.token_ids for pair in encoded]
        assert [capsule.token_ids.tolist() for capsule in capsules] == [pair.tolist() for pair in pairs]
        assert {capsule.pooling for capsule in capsules} == {Pooling.MEAN}
        assert {capsule.second_text for capsule in capsules} == {0}
        assert answer["usage"]["prompt_tokens"] == sum(map(len, pairs))
        api.generator.script = deltas([1.0], [2.0])
        scored = (await post(api, "/score", text_1=["a", "b"], text_2=["c", "d"], use_activation=False)).json()
        assert [each["score"] for each in scored["data"]] == [1.0, 2.0]
        assert len(api.generator.requests[-1].capsules) == 2


JUDGE = CrossEncoder(Pooling.LAST, sigmoid=True, form=PairForm.JUDGED)
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("instruction", [None, "Find what is meant."])
async def test_qwen3_reranker_is_asked_by_its_own_prompt(instruction: str | None):
    """That of its model card, whose parts are tokenized apart."""
    async with running_api(cross_encoder=JUDGE) as api:
        api.generator.script = deltas([0.0], [2.0], [-2.0])
        answer = (await post(api, **RANKED, instruction=instruction)).json()
        assert [result["index"] for result in answer["results"]] == [1, 0, 2]
        assert answer["results"][0]["relevance_score"] == pytest.approx(1 / (1 + np.exp(-2.0)), abs=1e-7)
        (request,) = api.generator.requests
        asked = instruction or "Given a web search query, retrieve relevant passages that answer the query"
        texts = [f"<Instruct>: {asked}\n<Query>: q\n<Document>: {text}" for text in RANKED["documents"]]
        expected = [[*api.tokens(BEFORE), *api.tokens(text), *api.tokens(AFTER)] for text in texts]
        assert [capsule.token_ids.tolist() for capsule in request.capsules] == expected
        assert {capsule.pooling for capsule in request.capsules} == {Pooling.LAST}


async def test_a_client_may_write_the_prompt_of_qwen3_reranker_itself():
    """As examples of vLLM do."""
    async with running_api(cross_encoder=JUDGE) as api:
        api.generator.script = deltas([1.0])
        await post(api, query=f"{BEFORE}<Query>: q\n", documents=[f"<Document>: d{AFTER}"])
        (capsule,) = api.generator.requests[0].capsules
        whole = f"{BEFORE}<Query>: q\n<Document>: d{AFTER}"
        assert capsule.token_ids.tolist() == api.tokenizer.encode(whole, add_special_tokens=True).tolist()


async def test_tokens_of_the_texts_go_and_none_of_the_prompt_around_them():
    async with running_api(cross_encoder=JUDGE) as api:
        before, after = api.tokens(BEFORE), api.tokens(AFTER)
        most = len(before) + len(after) + 30
        for side, kept in (("right", slice(None, 30)), ("left", slice(-30, None))):
            api.generator.script = deltas([1.0])
            text = "a text of some words " * 5
            await post(api, query="q", documents=[text], truncate_prompt_tokens=most, truncation_side=side)
            (capsule,) = api.generator.requests[-1].capsules
            asked = "Given a web search query, retrieve relevant passages that answer the query"
            middle = api.tokens(f"<Instruct>: {asked}\n<Query>: q\n<Document>: {text}")[kept]
            assert capsule.token_ids.tolist() == [*before, *middle, *after]
        assert refusal(await post(api, **RANKED, truncate_prompt_tokens=most - 30))[0] == "truncate_prompt_tokens"
        assert refusal(await post(api, query="q", documents=["a", "long " * 400]))[0] == "documents[1]"


async def test_two_texts_without_marks_are_one():
    """`use_sep_token: false` in config.json."""
    joined = CrossEncoder(Pooling.LAST, sigmoid=True, form=PairForm.JOINED)
    async with running_api(cross_encoder=joined) as api:
        api.generator.script = deltas([1.0])
        await post(api, query="Query: q ", documents=["Document: d"])
        (capsule,) = api.generator.requests[0].capsules
        assert capsule.token_ids.tolist() == [bos(api), *api.tokens("Query: q Document: d")]


async def test_an_instruction_for_a_model_without_one_is_refused(api: Api):
    assert refusal(await post(api, **RANKED, instruction="Find it."))[0] == "instruction"


async def test_padding_at_the_end_of_a_pair_does_not_count():
    """The score is that of the last token which is none, as in `transformers`."""
    async with running_api(cross_encoder=CrossEncoder(Pooling.LAST, sigmoid=True, padding_id=1)) as api:
        api.generator.script = deltas([1.0])
        await post(api, query="q", documents=["a <|eos|> b<|eos|><|eos|>"])
        (capsule,) = api.generator.requests[0].capsules
        whole = api.tokenizer.encode_pair(("q", "a <|eos|> b"), None, from_left=False).token_ids
        assert capsule.token_ids.tolist() == whole.tolist()
        assert capsule.num_prompt == len(whole)


async def test_a_cross_encoder_with_types_of_tokens_is_told_where_the_second_text_begins():
    async with running_api(cross_encoder=CrossEncoder(Pooling.CLS, sigmoid=True, token_types=True)) as api:
        api.generator.script = deltas([1.0], [2.0], [3.0])
        await post(api, **RANKED)
        firsts = [capsule.second_text for capsule in api.generator.requests[0].capsules]
        encoded = [api.tokenizer.backend.encode("q", text) for text in RANKED["documents"]]
        assert firsts == [encoding.type_ids.index(1) for encoding in encoded]
        assert min(firsts) > 0


async def test_a_cross_encoder_cuts_the_longer_text_and_names_one_that_is_too_long():
    async with running_api(cross_encoder=CrossEncoder(Pooling.CLS, sigmoid=True)) as api:
        assert refusal(await post(api, query="q", documents=["a", "long " * 300]))[0] == "documents[1]"
        api.generator.script = deltas([1.0])
        await post(api, query="qrs", documents=["abcdefgh"], truncate_prompt_tokens=7)
        pair = api.tokenizer.encode_pair(("qrs", "abcdefgh"), 7, from_left=False)
        assert api.generator.requests[-1].capsules[0].token_ids.tolist() == pair.token_ids.tolist()
        assert len(pair.token_ids) == 7
        assert pair.num_cut > 0


async def test_a_cross_encoder_makes_no_embeddings():
    async with running_api(cross_encoder=CrossEncoder(Pooling.CLS, sigmoid=True)) as api:
        for path in ("/v1/embeddings", "/pooling"):
            assert refusal(await post(api, path, input="a"))[0] == "model"
