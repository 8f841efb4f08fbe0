"""Tools in requests: which there are, which must be called, and the calls of earlier messages."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.strict import Open, Strict

MAX_TOOLS = 128
_MAX_CALLS = 512  # of one message

# OpenAI takes 64 characters, Anthropic 128.
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(Open):
    """A function that a model may call. strict: its arguments match `parameters`, a JSON Schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Open):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        yield from (f"function.{name}" for name in self.function.unknown_fields())


class ChosenFunction(Strict):
    """The function that a `tool_choice` names."""

    name: str


class NamedChoice(Strict):
    """The `tool_choice` that names one tool."""

    type: Literal["function"]
    function: ChosenFunction


CHOICES = ("none", "auto", "required")  # that name no tool


def _choice(value: object) -> object:
    """Reads a choice here: the errors of a union would name its classes."""
    try:
        return value if value in CHOICES else NamedChoice.model_validate(value)
    except ValidationError as error:
        known = {"words": ", ".join(CHOICES), "form": '{"type": "function", "function": {"name": ...}}'}
        raise PydanticCustomError("tool_choice", "It must be one of {words}, or {form}.", known) from error


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedChoice, BeforeValidator(_choice)]
Tools = Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)]


class CalledFunction(Open):
    """The function of an earlier call. arguments: JSON, as the model wrote it."""

    name: str
    arguments: str = "{}"


class EarlierCall(Open):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_value(self) -> dict[str, Any]:
        """The call as chat templates know it: arguments are values where they are JSON."""
        arguments: object = self.function.arguments
        with suppress(orjson.JSONDecodeError):  # a model wrote it; the template shows it as it is
            arguments = orjson.loads(self.function.arguments or "{}")
        named = {} if self.id is None else {"id": self.id}
        return {**named, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


EarlierCalls = Annotated[list[EarlierCall], Field(max_length=_MAX_CALLS)]


def as_values(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as chat templates know them: without what is not set."""
    return [{"type": "function", "function": tool.function.model_dump(exclude_none=True)} for tool in tools]


def schemas(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """The schemas of the tools' parameters, by name."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raises ApiError for a choice of no such tool, and for two tools of one name."""
    names = [tool.function.name for tool in tools]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise invalid(f"Invalid 'tools': there are two of the name '{name}'.", f"tools[{number}].function.name")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        raise _no_such_tool(choice.function.name)
    if not tools and choice == "required":
        raise invalid("Invalid 'tool_choice': there are no 'tools' to choose from.", "tool_choice", "invalid_value")


def _no_such_tool(name: str) -> ApiError:
    message = f"Invalid 'tool_choice': there is no tool '{name[:64]}' in 'tools'."
    return invalid(message, "tool_choice", "invalid_value")
