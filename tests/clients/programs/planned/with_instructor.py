"""Instructor in each of its modes for OpenAI's and Anthropic's clients, whole and streamed."""

from collections.abc import Iterable
from typing import Any

import instructor
from anthropic import Anthropic
from instructor import Mode
from openai import OpenAI

from tests.clients.asked import Weather
from tests.clients.programs.running import run

BY_CALL, BY_TEXT, IN_MARKDOWN = "Follow plan:call.", "Follow plan:text.", "Follow plan:markdown."
STREAMED = {BY_CALL: "Follow plan:partial-call."}  # instructor gives the class of parts another name
PARIS, ROME = {"city": "Paris", "days": 3}, {"city": "Rome", "days": 1}
CHATS = {
    Mode.TOOLS: BY_CALL,
    Mode.TOOLS_STRICT: BY_CALL,
    Mode.FUNCTIONS: BY_CALL,
    Mode.JSON: BY_TEXT,
    Mode.JSON_SCHEMA: BY_TEXT,
    Mode.JSON_O1: BY_TEXT,
    Mode.MD_JSON: IN_MARKDOWN,
}
RESPONSES = {Mode.RESPONSES_TOOLS: BY_CALL, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS: BY_CALL}
MESSAGES = {Mode.ANTHROPIC_TOOLS: BY_CALL, Mode.ANTHROPIC_REASONING_TOOLS: BY_CALL, Mode.ANTHROPIC_JSON: BY_TEXT}


def asked(prompt: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 512, "max_retries": 0}


def for_openai(url: str, mode: Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)


def for_anthropic(url: str, mode: Mode) -> Any:
    return instructor.from_anthropic(Anthropic(base_url=url, api_key="none", max_retries=0), mode=mode)


def objects_by_chats(url: str) -> None:
    for mode, prompt in CHATS.items():
        print(mode, flush=True)
        client = for_openai(url, mode)
        assert client.chat.completions.create(response_model=Weather, **asked(prompt)).model_dump() == PARIS
        fields = asked(STREAMED.get(prompt, prompt))
        parts = list(client.chat.completions.create_partial(response_model=Weather, **fields))
        assert parts[-1].model_dump() == PARIS


def several_objects_by_parallel_calls(url: str) -> None:
    client = for_openai(url, Mode.PARALLEL_TOOLS)
    found = client.chat.completions.create(response_model=Iterable[Weather], **asked("Follow plan:calls."))
    assert [each.model_dump() for each in found] == [PARIS, ROME]


def objects_by_responses(url: str) -> None:
    for mode, prompt in RESPONSES.items():
        print(mode, flush=True)
        fields = {"model": "m", "input": prompt, "max_retries": 0}
        assert for_openai(url, mode).responses.create(response_model=Weather, **fields).model_dump() == PARIS


def objects_by_messages(url: str) -> None:
    for mode, prompt in MESSAGES.items():
        print(mode, flush=True)
        client = for_anthropic(url, mode)
        assert client.messages.create(response_model=Weather, **asked(prompt)).model_dump() == PARIS


def several_objects_by_parallel_messages(url: str) -> None:
    client = for_anthropic(url, Mode.ANTHROPIC_PARALLEL_TOOLS)
    found = client.messages.create(response_model=Iterable[Weather], **asked("Follow plan:calls."))
    assert [each.model_dump() for each in found] == [PARIS, ROME]


if __name__ == "__main__":
    run(
        objects_by_chats,
        several_objects_by_parallel_calls,
        objects_by_responses,
        objects_by_messages,
        several_objects_by_parallel_messages,
    )
