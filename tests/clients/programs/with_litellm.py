"""LiteLLM, as a program uses it that keeps a conversation and sends back what it got."""

from typing import Any

import litellm

from tests.clients.asked import GREEDY, MAX_CALL_TOKENS, MESSAGES, MODEL, TOOL, Weather
from tests.clients.programs.running import run


def ask(url: str, **fields: Any) -> Any:
    """Completes a chat."""
    endpoint = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    return litellm.completion(**{**GREEDY, **endpoint, **fields})


def two_turns(url: str) -> None:
    """The second turn sends the first one's message as LiteLLM writes it, with fields that only LiteLLM knows."""
    first = ask(url).choices[0].message.model_dump()
    assert "provider_specific_fields" in first
    again = {"role": "user", "content": "And Rome?"}
    second = ask(url, messages=[*MESSAGES, first, again])
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens > ask(url).usage.prompt_tokens


def a_stream_joins_to_the_whole_answer(url: str) -> None:
    chunks = list(ask(url, stream=True, stream_options={"include_usage": True}))
    whole = ask(url)
    joined = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == joined.choices[0].message.content == whole.choices[0].message.content
    assert joined.usage.completion_tokens == whole.usage.completion_tokens


def a_tool_is_called_and_its_result_sent_back(url: str) -> None:
    tools = [{"type": "function", "function": TOOL}]
    calls = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": MAX_CALL_TOKENS}
    message = ask(url, **calls).choices[0].message
    (call,) = message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    turns = [*MESSAGES, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    answer = ask(url, messages=turns, tools=tools, tool_choice="none")
    assert answer.choices[0].message.content


if __name__ == "__main__":
    run(two_turns, a_stream_joins_to_the_whole_answer, a_tool_is_called_and_its_result_sent_back)
