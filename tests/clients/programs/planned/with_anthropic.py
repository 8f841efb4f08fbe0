"""Anthropic's client for Python: its tool runner, whole and streamed, sync and async."""

import asyncio
from typing import Any, Literal

from anthropic import Anthropic, AsyncAnthropic, beta_async_tool, beta_tool

from tests.clients.programs.running import run

CALLED = ["Paris", "Rome", "Paris", "Rome"]
ASKED: dict[str, Any] = {
    "model": "m",
    "max_tokens": 1024,
    "messages": [{"role": "user", "content": "Follow plan:weather."}],
}
STOPS = ["tool_use", "tool_use", "tool_use", "end_turn"]
City = Literal["Paris", "Rome"]


def the_runner_calls_until_the_model_answers(url: str) -> None:
    called = []

    @beta_tool  # type: ignore[untyped-decorator]  # of a library that mypy is not shown
    def weather(city: City, days: int) -> str:
        """Tells the weather of a city."""
        called.append(city)
        return "Rain."

    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    last = client.beta.messages.tool_runner(**ASKED, tools=[weather]).until_done()
    assert last.content[-1].text == "It rains."
    assert called == CALLED
    streams = client.beta.messages.tool_runner(**ASKED, tools=[weather], stream=True)
    assert [stream.get_final_message().stop_reason for stream in streams] == STOPS
    assert called == CALLED * 2


def the_async_runner_does_the_same(url: str) -> None:
    called = []

    @beta_async_tool  # type: ignore[untyped-decorator]
    async def weather(city: City, days: int) -> str:
        """Tells the weather of a city."""
        called.append(city)
        return "Rain."

    async def work() -> None:
        async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            last = await client.beta.messages.tool_runner(**ASKED, tools=[weather]).until_done()
        assert last.content[-1].text == "It rains."

    asyncio.run(work())
    assert called == CALLED


if __name__ == "__main__":
    run(the_runner_calls_until_the_model_answers, the_async_runner_does_the_same)
