"""Answers in a form: JSON by a schema, and calls of tools; valid where they have the form, right where they say so too.

Once the server holds the answer to the form, so that it can only be cut off or wrong; once the model alone does.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from loadtest.quality.asked import AskedServer, each
from loadtest.quality.lines import Line, shares
from loadtest.quality.people import TOOLS, Person, Strict, Wish, described_tools, people, sentence, wishes

_ITEMS = 40
_ANSWER_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Formed:
    """An answer. right: it says what was asked for, which only a valid one does."""

    valid: bool
    right: bool


class JsonAnswers:
    """People read from sentences, as JSON objects. held: by `response_format`, else by words in the prompt alone."""

    def __init__(self, held: bool, num_items: int = _ITEMS) -> None:
        self._held, self._people = held, people(num_items)
        self.name = "json-schema" if held else "json-words"

    async def ask(self, server: AskedServer) -> list[Formed]:
        """Asks one server, as `Part.ask` says."""
        return await each(self._formed(server, person) for person in self._people)

    def compare(self, a: Sequence[Formed], b: Sequence[Formed]) -> list[Line]:
        """Compares the answers of two servers, as `Part.compare` says."""
        return _lines("JSON by response_format" if self._held else "JSON by words", a, b)

    async def _formed(self, server: AskedServer, person: Person) -> Formed:
        schema = Person.model_json_schema()
        words = f"{sentence(person)}\n\nAnswer with a JSON object of this schema and nothing else: {json.dumps(schema)}"
        fields: dict[str, Any] = {"messages": [{"role": "user", "content": words}], "max_tokens": _ANSWER_TOKENS}
        if self._held:
            form = {"name": "person", "schema": schema, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": form}
        answer = (await server.chat(fields))["message"]["content"]
        return formed(answer or "", person)


class ToolCalls:
    """Wishes that one of two tools fulfils. held: by `tool_choice: required`, else the model decides."""

    def __init__(self, held: bool, num_items: int = _ITEMS) -> None:
        self._held, self._wishes = held, wishes(num_items)
        self.name = "tools-required" if held else "tools-auto"

    async def ask(self, server: AskedServer) -> list[Formed]:
        """Asks one server, as `Part.ask` says."""
        return await each(self._called(server, wish) for wish in self._wishes)

    def compare(self, a: Sequence[Formed], b: Sequence[Formed]) -> list[Line]:
        """Compares the answers of two servers, as `Part.compare` says."""
        return _lines(f"tool call, {'required' if self._held else 'auto'}", a, b)

    async def _called(self, server: AskedServer, wish: Wish) -> Formed:
        choice = await server.chat(
            {
                "messages": [{"role": "user", "content": wish.text}],
                "max_tokens": _ANSWER_TOKENS,
                "tools": described_tools(),
                "tool_choice": "required" if self._held else "auto",
                "parallel_tool_calls": False,
            }
        )
        return called([call["function"] for call in choice["message"].get("tool_calls") or ()], wish)


def formed(text: str, expected: Strict) -> Formed:
    """Reads a JSON answer, which may stand in a code fence of Markdown."""
    bare = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    return _read(bare, type(expected), expected)


def called(functions: Sequence[dict[str, Any]], wish: Wish) -> Formed:
    """Reads the calls of an answer, of which there is to be one, to a tool that there is."""
    if len(functions) != 1 or functions[0]["name"] not in TOOLS:
        return Formed(valid=False, right=False)
    (function,) = functions
    return _read(function["arguments"], TOOLS[function["name"]], wish.arguments)


def _read(text: str, form: type[Strict], expected: Strict) -> Formed:
    try:
        found = form.model_validate_json(text)
    except ValidationError:
        return Formed(valid=False, right=False)
    return Formed(valid=True, right=found == expected)


def _lines(measure: str, a: Sequence[Formed], b: Sequence[Formed]) -> list[Line]:
    return [
        shares(f"{measure}: valid", [one.valid for one in a], [one.valid for one in b]),
        shares(f"{measure}: right", [one.right for one in a], [one.right for one in b]),
    ]
