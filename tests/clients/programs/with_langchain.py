"""LangChain's chat model for the OpenAI API."""

from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.clients.asked import MAX_CALL_TOKENS, MODEL, Weather
from tests.clients.programs.running import run

QUESTION = HumanMessage("Which weather has Paris?")


def model(url: str, max_tokens: int = 16) -> Any:
    """A chat model of the gateway's."""
    return ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=max_tokens, max_retries=0
    )


def a_stream_joins_to_the_whole_answer(url: str) -> None:
    whole = model(url).invoke([QUESTION])
    chunks = list(model(url).stream([QUESTION], stream_usage=True))
    joined = sum(chunks[1:], chunks[0])
    assert joined.text == whole.text
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def bound_tools_are_called_and_their_results_sent_back(url: str) -> None:
    calling = model(url, MAX_CALL_TOKENS).bind_tools([Weather], tool_choice="required", parallel_tool_calls=False)
    asked = calling.invoke([QUESTION])
    (call,) = asked.tool_calls
    Weather.model_validate(call["args"])
    chunks = list(calling.stream([QUESTION]))
    (streamed,) = sum(chunks[1:], chunks[0]).tool_calls
    assert streamed["args"] == call["args"]
    turns = [QUESTION, asked, ToolMessage("Rain.", tool_call_id=call["id"])]
    assert model(url).bind_tools([Weather], tool_choice="none").invoke(turns).text


def an_answer_has_the_form_of_a_class(url: str) -> None:
    for method in ("json_schema", "function_calling"):
        structured = model(url, MAX_CALL_TOKENS).with_structured_output(Weather, method=method)
        assert isinstance(structured.invoke([QUESTION]), Weather)


if __name__ == "__main__":
    run(
        a_stream_joins_to_the_whole_answer,
        bound_tools_are_called_and_their_results_sent_back,
        an_answer_has_the_form_of_a_class,
    )
