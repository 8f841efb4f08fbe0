"""Requests with fields of their own: answers by a JSON schema, and answers that call tools."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.bench.lengths import Lengths
from loadtest.bench.prompts import Prompts
from loadtest.bench.script import Script, Seed, Turn, numbers
from loadtest.cannot_run import CannotRun

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": {"type": "string", "maxLength": 40},
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "languages", "married"],
    "additionalProperties": False,
}
_WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
_SEARCH = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "maxLength": 80},
        "limit": {"type": "integer", "minimum": 1, "maximum": 50},
    },
    "required": ["query", "limit"],
    "additionalProperties": False,
}
_TASKS = {
    "structured": "Describe a person as JSON, inspired by these words:",
    "tools": "Call the tool that fits these words best:",
}


@dataclass(frozen=True, slots=True)
class WithFields:
    """Requests of a task and random words, all with the same further fields. kind: `structured` or `tools`."""

    kind: str
    fields: Mapping[str, Any]
    num_scripts: int | None
    input: Lengths
    output: Lengths
    prompts: Prompts

    @property
    def name(self) -> str:
        """See `Workload.name`."""
        return f"{self.kind}, {self.input} / at most {self.output} tokens"

    def scripts(self, seed: Seed) -> Iterator[Script]:
        """See `Workload.scripts`."""
        random = np.random.default_rng(seed)
        for _ in numbers(self.num_scripts):
            words = self.prompts.make(random, self.input.draw(random))
            prompt = self.prompts.join(_TASKS[self.kind], words)
            yield Script((Turn(prompt, self.output.draw(random), self.fields),))


def schema_fields(file: Path | None) -> Mapping[str, Any]:
    """Asks for an answer by a schema, that of a person where no file is named. Raises CannotRun."""
    schema = _PERSON if file is None else _read(file)
    form = {"name": "answer", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def tool_fields() -> Mapping[str, Any]:
    """Asks for a call of one of two tools."""
    return {
        "tools": [
            _tool("get_weather", "The weather in a city today.", _WEATHER),
            _tool("search", "Searches the web.", _SEARCH),
        ],
        "tool_choice": "required",
    }


def _tool(name: str, description: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _read(file: Path) -> Any:
    try:
        schema = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CannotRun(f"--schema {file}: {error}") from error
    if not isinstance(schema, dict):
        raise CannotRun(f"--schema {file}: a schema is a JSON object")
    return schema
