"""Calls of tools in earlier messages. A history never changes, so whatever an answer had is read."""

from contextlib import suppress
from typing import Annotated, Any

import orjson
from pydantic import BeforeValidator, Field

from services.gateway.api.requests.strict import Open
from services.gateway.api.requests.tools import INPUT

_MAX_CALLS = 512  # of one message


def _as_id(value: object) -> object:
    return str(value) if isinstance(value, int | float) else value


CallId = Annotated[str | None, BeforeValidator(_as_id, json_schema_input_type=str | float | None)]


class CalledFunction(Open):
    """The function of an earlier call. arguments: JSON, as the model wrote it, or its value, or no JSON at all."""

    name: str | None = None
    arguments: Any = None

    @property
    def value(self) -> object:
        """The arguments as chat templates know them: values where they are JSON, else the text."""
        value = self.arguments
        if isinstance(value, str):
            with suppress(orjson.JSONDecodeError):  # a model wrote it; the template shows it as it is
                value = orjson.loads(value or "{}")
        return {} if value is None else value


class CalledCustom(Open):
    """The custom tool of an earlier call."""

    name: str | None = None
    input: Any = None

    @property
    def text(self) -> str:
        """The input, which is text; any other value as JSON."""
        if self.input is None:
            return ""
        return self.input if isinstance(self.input, str) else orjson.dumps(self.input).decode()


class EarlierCall(Open):
    """A call in an assistant's message."""

    id: CallId = None
    type: str | None = None
    function: CalledFunction | None = None
    custom: CalledCustom | None = None

    def as_value(self) -> dict[str, Any]:
        """The call as chat templates know it."""
        named = {} if self.id is None else {"id": self.id}
        return {**named, "type": "function", "function": self._called()}

    def _called(self) -> dict[str, Any]:
        if self.function is not None:
            return {"name": self.function.name or "", "arguments": self.function.value}
        if self.custom is not None:
            return {"name": self.custom.name or "", "arguments": {INPUT: self.custom.text}}
        hosted = self.type not in (None, "function", "custom")  # a tool that another server ran
        return {"name": self.type if hosted else "", "arguments": {}}


EarlierCalls = Annotated[list[EarlierCall], Field(max_length=_MAX_CALLS)]
