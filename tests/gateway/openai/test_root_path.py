"""--root-path: the API below a prefix, for proxies that keep it and for those that strip it."""

import openai
import pytest
from starlette.routing import Route

from services.config.option import OptionError
from services.gateway.http.application import Application
from services.gateway.keys.authentication import Keys
from services.process.configs import parse_root_path
from tests.gateway.keys.key_files import bearer
from tests.gateway.running_api import MODEL, Api, running_api


async def complete(api: Api, prefix: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{api.base_url}{prefix}/v1", api_key="k", max_retries=0) as client:
        text: str = (await client.completions.create(model=MODEL, prompt="Hi")).choices[0].text
        return text


async def test_all_paths_are_served_below_the_prefix_and_without_it():
    async with running_api(root_path="/models/chat", keys=Keys(("k",)), allowed_origins=("*",)) as api:
        assert [await complete(api, prefix) for prefix in ("", "/models/chat")] == ["Hello", "Hello"]
        for path in ("/health", "/models/chat/health", "/models/chat", "/models/chat/"):
            assert (await api.http.get(path)).status_code == 200, path
        key = bearer("k")
        for path in ("/models/chats/health", "/models/health", "/models/chat/models/chat/health"):
            assert (await api.http.get(path, headers=key)).status_code == 404, path
        assert (await api.http.get("/models/chat/v1/models")).status_code == 401
        asked = await api.http.get("/models/chat/v1/models", headers=key | {"origin": "https://a"})
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "*")
        for path in ("/openapi.json", "/models/chat/openapi.json"):
            assert (await api.http.get(path)).json()["servers"] == [{"url": "/models/chat"}]


async def test_without_the_option_nothing_is_stripped_or_named():
    async with running_api() as api:
        assert "servers" not in (await api.http.get("/openapi.json")).json()
        assert (await api.http.get("/models/chat/health")).status_code == 404


@pytest.mark.parametrize("text", ["models", "https://a/models", "/a b", "//a", "/a?b", "/v1", "/v1/x/", "/docs", "/é"])
def test_what_is_no_prefix_is_refused(text: str):
    with pytest.raises(OptionError, match="beginning of"):
        parse_root_path(text)


async def test_no_prefix_hides_a_path_of_the_api():
    async with running_api() as api:
        app, _ = api.applications
    assert isinstance(app, Application)
    firsts = {
        f"/{parts[0]}"
        for each in app.router.routes
        if isinstance(each, Route) and len(parts := each.path.strip("/").split("/")) > 1
    }
    for first in firsts:
        with pytest.raises(OptionError):
            parse_root_path(first)
    assert [parse_root_path(text) for text in ("", "/", "/a/", "/v1x")] == ["", "", "/a", "/v1x"]
