"""Defaults of the server for requests: --clamp-max-tokens, and what streams and logprobs show."""

from services.gateway.api.requests.request_defaults import RequestDefaults
from tests.gateway.running_api import events, running_api
from tests.gateway.scripted_generator import Script, one_delta


async def test_max_tokens_are_cut_to_the_room():
    async with running_api(request_defaults=RequestDefaults(clamps_tokens=True)) as api:
        api.generator.max_model_len = 64
        for prompt, asked, expected in ([5] * 60, 32_000, 4), ([5] * 60, 3, 3), ([5] * 63, 2, 1):
            assert (await api.complete(prompt=prompt, max_tokens=asked)).status_code == 200
            assert api.generator.requests[-1].capsules[0].sampling.max_tokens == expected
        assert (await api.complete(prompt=[[5] * 60, [5] * 50], max_tokens=32_000)).status_code == 200
        cut = [capsule.sampling.max_tokens for capsule in api.generator.requests[-1].capsules]
        assert cut == [4, 14]
        assert (await api.chat(max_completion_tokens=32_000)).status_code == 200
        capsule = api.generator.requests[-1].capsules[0]
        assert capsule.sampling.max_tokens == 64 - len(capsule.token_ids)
        refused = await api.complete(prompt=[5] * 64, max_tokens=1)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        refused = await api.complete(prompt=[5] * 60, max_tokens=9, min_tokens=9)
        assert refused.json()["error"]["param"] == "min_tokens"


async def test_streams_end_with_their_usage_and_logprobs_name_ids_without_being_asked():
    async with running_api(request_defaults=RequestDefaults(include_usage=True, tokens_as_ids=True)) as api:
        api.generator.script = Script(one_delta([9]), as_asked=True)
        for send in (api.chat, api.complete):
            *chunks, last, _ = events(await send(stream=True))
            assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 1)
            assert chunks[-1]["usage"] is None
            assert (await send()).json()["usage"]["completion_tokens"] == 1
        named = (await api.complete(logprobs=0)).json()["choices"][0]["logprobs"]["tokens"]
        assert named == ["token_id:9"]
        plain = await api.complete(logprobs=0, return_tokens_as_token_ids=False)
        assert plain.json()["choices"][0]["logprobs"]["tokens"] == [api.tokenizer.token_bytes(9).decode()]
