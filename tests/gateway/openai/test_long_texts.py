"""Texts far beyond what is kept of them, or beyond the context: little of them is tokenized, and that is counted."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from services.config import Right
from services.gateway.api.dialects.prompts import tokens_of_text
from services.gateway.api.errors import ApiError
from services.gateway.api.generation import Delta
from services.gateway.api.requests.text_limits import TextLimits
from services.gateway.keys.authentication import Keys
from services.gateway.keys.changes import add_key
from services.gateway.keys.file import read_keys
from services.gateway.keys.key_entry import RateLimits
from services.gateway.keys.local_quotas import LocalQuotas
from services.gateway.keys.quota import KeyQuota
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.outcomes import FinishReason
from tests.gateway.keys.key_files import bearer
from tests.gateway.running_api import MODEL, Api, running_api
from tests.gateway.scripted_generator import Script
from tests.gateway.tokenizer_files import byte_level, sentencepiece

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = "The first words, then much more: " + "word and more, " * 50_000 + "and these are the last words."
WITHOUT_WORDS = "0123456789" * 60_000
KEPT = 5
TOKENS = 1_000_000
MESSAGES = {"messages": [{"role": "user", "content": LONG}], "chat_template_kwargs": {"short": True}}

# By path: a body with the long text.
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"prompt": LONG},
    "/v1/embeddings": {"input": LONG},
    "/v1/chat/completions/render": MESSAGES,
    "/v1/completions/render": {"prompt": LONG},
    "/tokenize": {"prompt": LONG},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Api, dict[str, str]]]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    key = add_key(path, "acme", [Right.API], 0, RateLimits(tokens_per_minute=TOKENS))[1]
    store = LocalQuotas()
    keys = Keys((), read_keys(path), lambda id, limits: KeyQuota(id, limits, store, lambda _: None))
    async with running_api(keys=keys) as running:
        yield running, bearer(key)


def sent(api: Api, path: str) -> list[int]:
    """The token ids of the last request's prompt."""
    token_ids: list[int] = api.generator.requests[-1].capsules[0].token_ids.tolist()
    return token_ids


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/chat/completions"])
async def test_the_kept_tokens_are_those_of_the_whole_text(api: tuple[Api, dict[str, str]], path: str, side: str):
    running, headers = api
    vector = np.ones(4, np.float32)
    embedding = Script([Delta([], None, FinishReason.LENGTH, 0, embedding=vector)])
    before, running.generator.script = (
        running.generator.script,
        embedding if "embed" in path else running.generator.script,
    )
    body = {"model": MODEL, **PATHS[path], "truncate_prompt_tokens": KEPT, "truncation_side": side}
    answer = await running.http.post(path, json=body, headers=headers)
    running.generator.script = before
    assert answer.status_code == 200, answer.text
    used = TOKENS - int(answer.headers["x-ratelimit-remaining-tokens"])
    text = LONG if "chat" not in path else f"<|im_start|>user\n{LONG}<|im_end|>\n<|im_start|>assistant\n"
    whole = running.tokenizer.encode(text, add_special_tokens="chat" not in path).tolist()
    expected = whole[:KEPT] if side == "right" else whole[-KEPT:]
    if "embed" in path and side == "left":
        expected = [whole[0], *whole[-KEPT + 1 :]]  # special tokens stay
    assert sent(running, path) == expected
    assert KEPT < used < 20_000, "what was made of the text, of its 500,000 tokens"


@pytest.mark.parametrize("path", PATHS)
async def test_a_long_text_without_words_is_refused_by_its_size(api: tuple[Api, dict[str, str]], path: str):
    running, headers = api
    body = {
        name: [{"role": "user", "content": WITHOUT_WORDS}] if name == "messages" else WITHOUT_WORDS
        for name in PATHS[path]
        if name in ("messages", "prompt", "input")
    }
    for side in ("left", "right"):
        fields = {"truncate_prompt_tokens": KEPT, "truncation_side": side}
        answer = await running.http.post(path, json={"model": MODEL, **body, **fields}, headers=headers)
        if "chat" in path:
            assert answer.status_code in (200, 400)  # the template has words around the text
            continue
        assert answer.status_code == 400, answer.text[:200]
        assert answer.json()["error"]["code"] == "string_above_max_length"


@pytest.mark.parametrize("path", PATHS)
async def test_a_text_beyond_the_context_is_refused(api: tuple[Api, dict[str, str]], path: str):
    running, headers = api
    answer = await running.http.post(path, json={"model": MODEL, **PATHS[path]}, headers=headers)
    assert answer.status_code == 400, answer.text[:200]
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("backend", [byte_level, sentencepiece])
@pytest.mark.parametrize("kept", [None, 4096, 10**9])
async def test_a_text_beyond_the_context_is_not_tokenized_as_a_whole(backend: Any, kept: int | None):
    """Also where nobody can tell by the length of the text alone, as its tokenizer changes texts."""
    limits = TextLimits(max_tokens=2048, kept=kept, from_right=False, param="prompt")
    with pytest.raises(ApiError, match="far longer") as refused:
        tokens_of_text(Tokenizer(backend(), {}), LONG, limits, add_special_tokens=True)
    assert refused.value.code == "context_length_exceeded"
