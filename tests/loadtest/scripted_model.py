"""A server of OpenAI's API in this process whose model is a rule: what it should answer can be said by hand."""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.loadtest.bench_server import BenchServer


@dataclass
class ScriptedModel(BenchServer):
    """A token is a word. choices: every token of a prompt has a chance of one in so many.

    memory_chars: how much of a prompt's end it remembers codes in; answer_words: what it goes on with. tells: what it
    says of people and how it calls tools.
    """

    choices: int = 10
    memory_chars: int = 1 << 30
    answer_words: str = "and so on"
    max_model_len: int = 1 << 20
    fenced: bool = False
    has_tools: bool = True

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        prompt: str = body["prompt"]
        choice: dict[str, Any] = {"text": self.answer(prompt), "prompt_token_ids": ids(prompt)}
        choice["token_ids"] = ids(choice["text"])
        if "prompt_logprobs" in body:
            own = {"7": {"logprob": -math.log(self.choices), "rank": 3, "decoded_token": "a"}}
            choice["prompt_logprobs"] = [None, *[own] * (len(prompt.split()) - 1)]
        return JSONResponse({"choices": [choice]})

    def answer(self, prompt: str) -> str:
        """What goes on a prompt: the code that it asks for, if the prompt's end has one."""
        asked = re.search(r"The code of the ([a-z ]+) is$", prompt)
        if asked is None:
            return self.answer_words
        found = re.search(rf"The code of the {asked[1]} is (\d+)\.", prompt[-self.memory_chars :])
        return f" {found[1]}." if found else " unknown"

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        words = body["messages"][0]["content"]
        if "tools" in body:
            if not self.has_tools:
                return JSONResponse({"error": {"message": "no tools\nhere"}}, 400)
            return self.message({"content": None, "tool_calls": [{"type": "function", "function": call(words)}]})
        told = re.match(r"(\w+) is (\d+) years old and lives in (\w+)", words)
        assert told is not None
        text = json.dumps({"name": told[1], "age": int(told[2]), "city": told[3]})
        return self.message({"content": f"```json\n{text}\n```" if self.fenced else text})

    def message(self, message: dict[str, Any]) -> Response:
        return JSONResponse({"choices": [{"message": message}]})

    async def tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": ids((await request.json())["prompt"])})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "scripted", "max_model_len": self.max_model_len}]})

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/v1/models", self.models),
            ]
        )


def ids(text: str) -> list[int]:
    """A number for each word."""
    return [int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "big") for word in text.split()]


def call(words: str) -> dict[str, str]:
    """The tool that a wish wants."""
    if clock := re.search(r"(\d+):(\d+)", words):
        return {"name": "set_alarm", "arguments": json.dumps({"hour": int(clock[1]), "minute": int(clock[2])})}
    return {"name": "get_weather", "arguments": json.dumps({"city": words.rpartition(" ")[2].strip("?")})}
