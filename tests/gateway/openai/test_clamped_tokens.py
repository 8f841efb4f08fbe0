"""With --clamp-max-tokens, a request for more tokens than the context has room for gets what fits."""

from tests.gateway.running_api import running_api


async def test_max_tokens_are_cut_to_the_room():
    async with running_api(clamps_tokens=True) as api:
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
