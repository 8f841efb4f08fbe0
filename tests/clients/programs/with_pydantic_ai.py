"""Pydantic AI: an agent that calls a tool, is given the result and answers."""

from collections.abc import Callable
from typing import Any

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.clients.asked import MAX_CALL_TOKENS, MESSAGES, MODEL, Weather
from tests.clients.programs.running import run

QUESTION = MESSAGES[0]["content"]


class CallsFirst(AbstractCapability):  # type: ignore[misc]  # of a library that mypy is not shown
    """Requires a call of a tool in the first turn and none later: a model of random weights decides nothing itself."""

    def get_model_settings(self) -> Callable[[Any], ModelSettings]:
        """Settings of each turn."""
        return lambda context: ModelSettings(tool_choice="required" if context.run_step == 1 else "none")


def model(url: str) -> OpenAIChatModel:
    """A chat model of the gateway's."""
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def an_agent_calls_a_tool_and_answers(url: str) -> None:
    called = []

    def weather(asked: Weather) -> str:
        """Tells the weather of a city."""
        called.append(asked)
        return "Rain."

    settings = ModelSettings(temperature=0, max_tokens=MAX_CALL_TOKENS, parallel_tool_calls=False)
    agent = Agent(model(url), tools=[weather], capabilities=[CallsFirst()], model_settings=settings)
    result = agent.run_sync(QUESTION)
    assert [type(each) for each in called] == [Weather]
    assert result.output
    assert result.usage.requests == 2


def an_answer_has_the_form_of_a_class(url: str) -> None:
    settings = ModelSettings(temperature=0, max_tokens=MAX_CALL_TOKENS)
    agent = Agent(model(url), output_type=NativeOutput(Weather), model_settings=settings)
    assert isinstance(agent.run_sync(QUESTION).output, Weather)


if __name__ == "__main__":
    run(an_agent_calls_a_tool_and_answers, an_answer_has_the_form_of_a_class)
