"""Instructor, which makes objects of classes out of chats."""

import instructor
from openai import OpenAI

from tests.clients.asked import GREEDY, MAX_CALL_TOKENS, Weather
from tests.clients.programs.running import run


def ask(url: str, mode: instructor.Mode) -> None:
    """Asks for an object; nothing is asked twice where it is not valid."""
    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
    asked = {**GREEDY, "max_tokens": MAX_CALL_TOKENS, "max_retries": 0}
    assert isinstance(client.chat.completions.create(response_model=Weather, **asked), Weather)


def an_object_by_a_tool(url: str) -> None:
    ask(url, instructor.Mode.TOOLS)


def an_object_by_a_schema(url: str) -> None:
    ask(url, instructor.Mode.JSON_SCHEMA)


if __name__ == "__main__":
    run(an_object_by_a_schema, an_object_by_a_tool)
