"""--console-text: the text of requests is kept where it is asked for, bounded, and nowhere else."""

import pytest

from services.gateway.api.records.kept_text import GAP, MAX_ANSWER_CHARACTERS, MAX_PROMPT_CHARACTERS, KeptText
from tests.gateway.running_api import Api, running_api
from tests.gateway.scripted_generator import Script, delta_per_token, one_delta


async def text_of(api: Api, request_id: str) -> dict[str, object] | None:
    found: dict[str, object] | None = (await api.admin.get(f"/console/requests/{request_id}")).json()["text"]
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_s_text_is_kept_where_it_is_asked_for(stream: bool):
    async with running_api(keeps_text=True) as api:
        api.generator.script = Script(delta_per_token(api.tokens("Hello there, you")))
        answer = await api.complete(prompt="Say hello", max_tokens=20, stream=stream, n=2)
        kept = await text_of(api, answer.headers["x-request-id"])
        assert kept == {"prompt": "<|bos|>Say hello", "answers": ["Hello there, you"] * 2, "cut": False}
        assert (await api.admin.get("/console/about")).json()["text"] is True


async def test_a_chat_s_prompt_has_the_marks_of_its_template():
    async with running_api(keeps_text=True) as api:
        answer = await api.chat(messages=[{"role": "user", "content": "Hi"}])
        kept = await text_of(api, answer.headers["x-request-id"])
        assert kept is not None
        assert kept["prompt"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


async def test_no_text_is_anywhere_unless_it_is_asked_for():
    async with running_api() as api:
        secret = "a rather secret prompt"
        api.generator.script = Script(one_delta(api.tokens("a rather secret answer")))
        answer = await api.complete(prompt=secret, max_tokens=20)
        request_id = answer.headers["x-request-id"]
        assert await text_of(api, request_id) is None
        shown = [
            (await api.admin.get(path)).text
            for path in ("/debug/requests", f"/debug/requests/{request_id}", f"/console/requests/{request_id}")
        ]
        rows = api.feed._sources.records.rows
        rows.settle()
        (row,) = rows.ended_between(0, 1)
        assert "secret" not in f"{shown} {row!r} {api.logs}"


def test_a_long_prompt_and_a_long_answer_are_cut():
    kept = KeptText()
    kept.note_prompt("a" * 9000, "b" * 9000)
    assert (kept.prompt[:2], kept.prompt[-2:], GAP in kept.prompt, kept.cut) == ("aa", "bb", True, True)
    assert len(kept.prompt) <= MAX_PROMPT_CHARACTERS + len(GAP)
    whole = KeptText()
    whole.note_prompt("a prompt", "")
    whole.note_answer(0, "x" * (MAX_ANSWER_CHARACTERS - 1))
    assert not whole.cut
    whole.note_answer(1, "yy")
    whole.note_answer(99, "z")
    assert ([len(answer) for answer in whole.answers], whole.cut) == ([MAX_ANSWER_CHARACTERS - 1, 1], True)


async def test_only_the_ends_of_a_very_long_prompt_become_text():
    async with running_api(keeps_text=True) as api:
        api.generator.max_model_len = 20_000
        words = [f"w{number} " for number in range(3000)]
        answer = await api.complete(prompt="".join(words), max_tokens=2)
        kept = await text_of(api, answer.headers["x-request-id"])
        assert kept is not None
        prompt = str(kept["prompt"])
        assert (prompt.startswith("<|bos|>w0 w1 "), prompt.endswith("w2999 "), kept["cut"]) == (True, True, True)
        assert len(prompt) <= MAX_PROMPT_CHARACTERS + len(GAP)
