"""Where in a prompt's text its tokens are: `return_token_offsets` of the endpoints that render, beside transformers."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from transformers import PreTrainedTokenizerFast

from services.gateway.text.cuts import MOST_UNCUT
from tests.gateway.running_api import Api, events, running_api
from tests.gateway.tokenizer_files import CHATML

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "größer 🙂 日本語 <|im_end|>naïve 👩‍👩‍👧🏽 e\u0301"
MESSAGES = [{"role": "system", "content": "Ελλάδα 🙂"}, {"role": "user", "content": TEXT}]
CONTEXT = 256


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running


@pytest.fixture(scope="module")
def oracle(api: Api) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=api.tokenizer.backend)


async def rendered(api: Api, path: str, **fields: Any) -> Any:
    response = await api.http.post(f"/v1/{path}/render", json={"return_token_offsets": True, **fields})
    assert response.status_code == 200, response.text
    assert "x-baton-ignored-fields" not in response.headers
    return response.json()


def expected(oracle: PreTrainedTokenizerFast, text: str, **options: Any) -> tuple[list[int], list[list[int]]]:
    found = oracle(text, return_offsets_mapping=True, **options)
    return found["input_ids"], [[*place] for place in found["offset_mapping"]]


@pytest.mark.parametrize("special", [True, False])
async def test_a_text_has_the_offsets_of_transformers(api: Api, oracle: PreTrainedTokenizerFast, special: bool):
    (shown,) = await rendered(api, "completions", prompt=TEXT, add_special_tokens=special)
    assert (shown["token_ids"], shown["token_offsets"]) == expected(oracle, TEXT, add_special_tokens=special)
    assert max(end for _, end in shown["token_offsets"]) == len(TEXT) < len(TEXT.encode())
    assert ([0, 0] in shown["token_offsets"]) == special  # the token that was added


async def test_each_text_of_several_has_its_own_and_token_ids_have_none(api: Api, oracle: PreTrainedTokenizerFast):
    texts = ["日本", "größer", TEXT]
    listed = await rendered(api, "completions", prompt=texts, n=2)
    assert [entry["token_offsets"] for entry in listed] == [expected(oracle, text)[1] for text in texts]
    (shown,) = await rendered(api, "completions", prompt=[7, 8, 9])
    assert shown["token_offsets"] is None
    mixed = await rendered(api, "completions", prompt=["日本", [7, 8, 9]])
    assert [entry["token_offsets"] for entry in mixed] == [expected(oracle, "日本")[1], None]
    (echoed,) = await rendered(api, "completions", prompt=TEXT, echo=True, logprobs=1)
    assert echoed["token_offsets"] == expected(oracle, TEXT)[1]


async def test_a_chat_has_offsets_in_the_text_of_its_template(api: Api, oracle: PreTrainedTokenizerFast):
    text = oracle.apply_chat_template(MESSAGES, chat_template=CHATML, tokenize=False, add_generation_prompt=True)
    shown = await rendered(api, "chat/completions", messages=MESSAGES)
    assert (shown["token_ids"], shown["token_offsets"]) == expected(oracle, text, add_special_tokens=False)
    with_bos = await rendered(api, "chat/completions", messages=MESSAGES, add_special_tokens=True)
    assert with_bos["token_offsets"] == expected(oracle, text)[1]


@pytest.mark.parametrize("side", ["left", "right"])
async def test_what_is_cut_off_has_no_offsets_and_the_rest_keeps_its_own(
    api: Api, oracle: PreTrainedTokenizerFast, side: str
):
    cut = {"truncate_prompt_tokens": 9, "truncation_side": side}
    kept = slice(-9, None) if side == "left" else slice(9)
    (shown,) = await rendered(api, "completions", prompt=TEXT, **cut)
    ids, places = expected(oracle, TEXT)
    assert (shown["token_ids"], shown["token_offsets"]) == (ids[kept], places[kept])
    text = oracle.apply_chat_template(MESSAGES, chat_template=CHATML, tokenize=False, add_generation_prompt=True)
    shown = await rendered(api, "chat/completions", messages=MESSAGES, **cut)
    assert shown["token_offsets"] == expected(oracle, text, add_special_tokens=False)[1][kept]


@pytest.mark.few(1)
@pytest.mark.parametrize("side", ["left", "right"])
async def test_a_long_text_of_which_a_part_is_tokenized_has_offsets_in_the_whole(
    api: Api, oracle: PreTrainedTokenizerFast, side: str
):
    text = "".join(f"naïve 日本 {number} 🙂, " for number in range(MOST_UNCUT // 15))
    assert len(text) > MOST_UNCUT
    cut = {"truncate_prompt_tokens": -1, "truncation_side": side, "max_tokens": 56}
    (shown,) = await rendered(api, "completions", prompt=text, **cut)
    ids, places = expected(oracle, text)
    kept = slice(-(CONTEXT - 56), None) if side == "left" else slice(CONTEXT - 56)
    assert (shown["token_ids"], shown["token_offsets"]) == (ids[kept], places[kept])


async def test_who_does_not_ask_gets_none(api: Api):
    for asked in ({}, {"return_token_offsets": False}, {"return_token_offsets": None}):
        shown = (await api.http.post("/v1/completions/render", json={"prompt": TEXT, **asked})).json()
        assert shown[0]["token_offsets"] is None
    for path in ("messages", "responses"):
        fields = {"messages": [MESSAGES[1]], "max_tokens": 5} if path == "messages" else {"input": TEXT}
        shown = (await api.http.post(f"/v1/{path}/render", json=fields)).json()
        assert shown["token_offsets"] is None
    wrong = await api.http.post("/v1/completions/render", json={"prompt": TEXT, "return_token_offsets": 1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "return_token_offsets")


async def test_endpoints_that_generate_leave_it_out_and_name_it(api: Api):
    for response in (
        await api.chat(return_token_offsets=True),
        await api.complete(return_token_offsets=True),
        await api.complete(return_token_offsets=True, stream=True),
    ):
        assert response.status_code == 200, response.text
        assert response.headers["x-baton-ignored-fields"] == "return_token_offsets"
        assert "token_offsets" not in response.text
    assert "x-baton-ignored-fields" not in (await api.chat(return_token_offsets=False)).headers
    async with running_api(strict_fields=True) as strict:
        refused = (await strict.chat(return_token_offsets=True)).json()["error"]
        assert "the endpoints that render" in refused["message"]
        await rendered(strict, "completions", prompt=TEXT)


async def test_a_prompt_that_is_rendered_with_offsets_can_be_sent_to_be_answered(api: Api):
    (shown,) = await rendered(api, "completions", prompt=TEXT, stream=True)
    response = await api.http.post("/inference/v1/generate", json=shown)
    assert response.status_code == 200, response.text
    assert "x-baton-ignored-fields" not in response.headers
    assert events(response)[-1] == "[DONE]"
