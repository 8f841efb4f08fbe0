"""Responses of real processes, kept in Redis: two gateways, Redis gone, and a gateway that dies or drains."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.stack import Endpoint, running_stack, wait_until
from tests.redis_server import running_redis

GREEDY: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "max_output_tokens": 12,
    "extra_body": {"ignore_eos": True},
}


LONG: dict[str, Any] = {**GREEDY, "max_output_tokens": 400}


@pytest.mark.long
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


def status(gateway: Endpoint, response_id: str) -> str:
    return str(gateway.client.responses.retrieve(response_id).status)


@pytest.mark.long
def test_a_background_response_is_seen_and_cancelled_at_another_gateway_and_fails_where_its_own_dies(
    llama: Path, tmp_path: Path
):
    with running_redis(tmp_path) as server, running_stack(llama, redis_url=server.url) as stack:
        other = stack.gateway
        whole = other.client.responses.create(input="Hello", **GREEDY)
        with stack.serving("--redis-url", server.url) as own:
            short = own.client.responses.create(input="Hello", background=True, **GREEDY)
            events = list(other.client.responses.retrieve(short.id, stream=True))  # until it has ended
            assert events[-1].type == "response.incomplete"  # at its limit of tokens
            assert events[-1].response.output_text == whole.output_text
            assert list(own.client.responses.retrieve(short.id, stream=True, starting_after=4)) == events[5:]

            for process in stack.workers.values():
                process.freeze()
            waiting = own.client.responses.create(input="Hello", background=True, **LONG)
            assert status(other, waiting.id) == "queued"
            assert other.client.responses.cancel(waiting.id).status == "cancelled"
            assert status(own, waiting.id) == "cancelled"

            left = own.client.responses.create(input="Hello", background=True, **LONG)
            assert status(other, left.id) == "queued"
            own.kill()
            assert status(other, left.id) == "queued"
            took_s = wait_until(lambda: status(other, left.id) == "failed", 30, "the end of the lease")
            assert took_s < 20
            error = other.client.responses.retrieve(left.id).error
            assert error is not None
            assert "gateway" in error.message
        stack.heal()
        other.wait_for_baseline()


@pytest.mark.long
def test_a_gateway_that_drains_finishes_what_runs_in_the_background_or_ends_it_in_words(llama: Path, tmp_path: Path):
    with running_redis(tmp_path) as server, running_stack(llama, redis_url=server.url) as stack:
        other = stack.gateway
        for drain_s, ends in (("30", "incomplete"), ("0.5", "failed")):
            with stack.serving("--redis-url", server.url, "--drain-timeout", drain_s) as own:
                if ends == "failed":
                    for process in stack.workers.values():
                        process.freeze()
                queued = own.client.responses.create(input="Hello", background=True, **LONG)
                own.client.close()
                own.process.terminate()
                assert own.process.wait(40) == 0
                response = other.client.responses.retrieve(queued.id)
                assert response.status == ends
                assert response.usage is not None
                assert response.usage.output_tokens == (0 if ends == "failed" else LONG["max_output_tokens"])
                if response.error is not None:
                    assert "restarting" in response.error.message
        stack.heal()
        other.wait_for_baseline()
