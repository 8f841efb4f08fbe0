"""LiteLLM as a bridge: Anthropic's messages over OpenAI's chats and responses, and chats over Anthropic's messages."""

import asyncio
import json
from typing import Any

import litellm

from tests.clients.asked import TOOL, Weather
from tests.clients.programs.running import run

PROMPT = {"role": "user", "content": "Follow plan:weather."}
CALLED = ["Paris", "Rome"]
OFFERED = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
ROUNDS = 4  # at most


def messages_over_chats(url: str) -> None:
    """What lets Claude Code speak to a server of OpenAI's API: LiteLLM's `anthropic_messages`."""
    asyncio.run(_bridged("hosted_vllm/m", f"{url}/v1"))


def messages_over_responses(url: str) -> None:
    asyncio.run(_bridged("openai/m", f"{url}/v1"))


async def _bridged(model: str, url: str) -> None:
    endpoint = {"model": model, "api_base": url, "api_key": "none", "max_tokens": 512, "tools": [OFFERED]}
    turns: list[Any] = [PROMPT]
    called: list[str] = []
    for _ in range(ROUNDS):
        answer = await litellm.anthropic_messages(messages=turns, **endpoint)
        uses = [block for block in answer["content"] if block["type"] == "tool_use"]
        called += [Weather.model_validate(use["input"]).city for use in uses]
        if not uses:
            break
        assert answer["stop_reason"] == "tool_use"
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "Rain."} for use in uses]
        turns += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
    assert answer["content"][-1]["text"] == "It rains."
    assert called == CALLED


def chats_over_messages(url: str) -> None:
    """Chats of LiteLLM's own form, as it sends them to Anthropic's API."""
    endpoint = {"model": "anthropic/m", "api_base": url, "api_key": "none", "num_retries": 0, "max_tokens": 512}
    turns: list[Any] = [PROMPT]
    called: list[str] = []
    for _ in range(ROUNDS):
        message = litellm.completion(messages=turns, tools=[{"type": "function", "function": TOOL}], **endpoint)
        message = message.choices[0].message
        called += [json.loads(call.function.arguments)["city"] for call in message.tool_calls or ()]
        if not message.tool_calls:
            break
        results = [{"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in message.tool_calls]
        turns += [message.model_dump(), *results]
    assert message.content == "It rains."
    assert called == CALLED


if __name__ == "__main__":
    run(messages_over_chats, messages_over_responses, chats_over_messages)
