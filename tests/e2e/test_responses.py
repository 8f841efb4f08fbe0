"""Responses of real processes, kept in Redis: two gateways, and Redis gone."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.stack import running_stack, wait_until
from tests.redis_server import running_redis

GREEDY: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "max_output_tokens": 12,
    "extra_body": {"ignore_eos": True},
}


def test_a_conversation_goes_on_at_another_gateway_and_not_without_redis(llama: Path, tmp_path: Path):
    with running_redis(tmp_path) as server, running_stack(llama, redis_url=server.url) as stack:
        first = stack.gateway
        whole = first.client.responses.create(input="Hello", instructions="Be brief.", **GREEDY)
        stream = first.client.responses.create(input="Hello", instructions="Be brief.", stream=True, **GREEDY)
        events = list(stream)
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text == events[-1].response.output_text
        assert whole.usage.output_tokens == events[-1].response.usage.output_tokens == 12
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
        chat = first.client.chat.completions.create(
            messages=messages, model="tiny", temperature=0, max_tokens=12, extra_body={"ignore_eos": True}
        )
        assert whole.output_text == chat.choices[0].message.content

        with stack.serving("--redis-url", server.url) as second:
            assert second.client.responses.retrieve(whole.id) == whole
            turn = second.client.responses.create(input="Go on", previous_response_id=whole.id, **GREEDY)
            messages = [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": whole.output_text},
                {"role": "user", "content": "Go on"},
            ]
            chat = second.client.chat.completions.create(
                messages=messages, model="tiny", temperature=0, max_tokens=12, extra_body={"ignore_eos": True}
            )
            assert turn.output_text == chat.choices[0].message.content
            assert turn.usage.input_tokens == chat.usage.prompt_tokens

        server.kill()
        with pytest.raises(openai.InternalServerError, match="does not answer now"):
            first.client.responses.create(input="Go on", previous_response_id=turn.id, **GREEDY)
        alone = first.client.responses.create(input="Hello", instructions="Be brief.", **GREEDY)
        assert (alone.store, alone.output_text) == (False, whole.output_text)
        first.wait_for_baseline()


def test_a_response_in_the_background_is_seen_at_another_gateway_and_fails_with_its_own(llama: Path, tmp_path: Path):
    background = {"input": "Hello", "background": True, **GREEDY}
    with running_redis(tmp_path) as server, running_stack(llama, redis_url=server.url) as stack:
        first = stack.gateway
        whole = first.client.responses.create(input="Hello", **GREEDY)
        long = {**background, "max_output_tokens": 400}
        with stack.serving("--redis-url", server.url) as second:
            queued = second.client.responses.create(**background)
            assert queued.status == "queued"
            events = list(first.client.responses.retrieve(queued.id, stream=True))
            assert events[-1].response.output_text == whole.output_text
            assert list(second.client.responses.retrieve(queued.id, stream=True)) == events
            lost = second.client.responses.create(**long)
            second.process.kill()
        wait_until(lambda: first.client.responses.retrieve(lost.id).status == "failed", 30)
        first.wait_for_baseline()
