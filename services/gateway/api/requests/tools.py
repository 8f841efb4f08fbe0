"""Tools in requests: which there are, and which must be called.

A client runs its own tools: functions, whose arguments are JSON, and custom tools, whose input is text. Tools that only
a vendor's servers run are hints, and left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.requests.form_texts import Text
from services.gateway.api.requests.strict import Nested, Open, Strict

MAX_TOOLS = 128
INPUT = "input"  # the one argument of the function that a custom tool is for its model

# OpenAI takes 64 characters, Anthropic 128.
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(Open):
    """A function that a model may call. strict: its arguments match `parameters`, a JSON Schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Numbered(Nested):
    """An entry of `tools`."""

    _number: int = PrivateAttr(0)


class FunctionTool(_Numbered):
    """A function among the tools."""

    type: Literal["function"]
    function: Function

    @property
    def is_held(self) -> bool:
        """True when each of its calls must match its schema."""
        return bool(self.function.strict)

    @property
    def param(self) -> str:
        """The request's field that says what its calls look like."""
        return f"tools[{self._number}].function.parameters"


class InputGrammar(Strict):
    """A grammar of texts: in Lark's notation, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: Text


class InputFormat(Strict):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None

    @model_validator(mode="after")
    def _grammar_where_it_belongs(self) -> Self:
        if (self.type == "grammar") != (self.grammar is not None):
            raise PydanticCustomError("format", "'grammar' goes with the type 'grammar', and with no other.")
        return self


class Custom(Open):
    """A tool whose input is text."""

    name: Name
    description: str | None = None
    format: InputFormat | None = None


class CustomTool(_Numbered):
    """A custom tool among the tools. Its model sees it as a function of one text."""

    type: Literal["custom"]
    custom: Custom

    @property
    def grammar(self) -> InputGrammar | None:
        """The grammar of its input; None: any text."""
        return None if self.custom.format is None else self.custom.format.grammar

    @property
    def is_held(self) -> bool:
        """See FunctionTool."""
        return self.grammar is not None

    @property
    def param(self) -> str:
        """See FunctionTool."""
        return f"tools[{self._number}].custom.format"

    @cached_property
    def function(self) -> Function:
        """The function that the model sees."""
        text = {"type": "string"}
        if self.grammar is not None:
            text["description"] = f"Matches this {self.grammar.syntax} grammar:\n{self.grammar.definition}"
        schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
        return Function(name=self.custom.name, description=self.custom.description, parameters=schema)


class HostedTool(Open):
    """A tool that only a vendor's servers run."""

    type: str


Tool = FunctionTool | CustomTool


def _kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "(hosted)" if isinstance(kind, str) and kind not in ("function", "custom") else f"({kind or 'function'})"


def _numbered(tools: list[Tool | HostedTool]) -> list[Tool | HostedTool]:
    for number, tool in enumerate(tools):
        if not isinstance(tool, HostedTool):
            tool._number = number
    return tools


_AnyTool = Annotated[
    Annotated[FunctionTool, Tag("(function)")]
    | Annotated[CustomTool, Tag("(custom)")]
    | Annotated[HostedTool, Tag("(hosted)")],
    Discriminator(_kind, "tool_type", "It must be an object with a 'type'."),
]
Tools = Annotated[list[_AnyTool], Field(max_length=MAX_TOOLS), AfterValidator(_numbered)]


class ChosenTool(Strict):
    """The tool that a `tool_choice` names."""

    name: str


class NamedChoice(Strict):
    """The `tool_choice` that names one tool."""

    type: Literal["function", "custom"]
    function: ChosenTool | None = None
    custom: ChosenTool | None = None

    @model_validator(mode="after")
    def _name_where_it_belongs(self) -> Self:
        if (self.type == "function") != (self.function is not None) or (self.type == "custom") != (
            self.custom is not None
        ):
            raise ValueError("it names no tool, or two")
        return self

    @property
    def name(self) -> str:
        """The tool's name."""
        chosen = self.function or self.custom
        assert chosen is not None
        return chosen.name


CHOICES = ("none", "auto", "required")  # that name no tool


def _choice(value: object) -> object:
    """Reads a choice here: the errors of a union would name its classes."""
    try:
        return value if value in CHOICES else NamedChoice.model_validate(value)
    except ValidationError as error:
        known = {"words": ", ".join(CHOICES), "form": '{"type": "function", "function": {"name": ...}}'}
        raise PydanticCustomError("tool_choice", "It must be one of {words}, or {form}.", known) from error


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedChoice, BeforeValidator(_choice)]


def unknown_fields(tools: Sequence[Tool | HostedTool]) -> Iterator[str]:
    """Yields the paths of tools that are left out, and of fields that nothing acts on."""
    for number, tool in enumerate(tools):
        if isinstance(tool, HostedTool):
            yield f"tools[{number}]"
        else:
            yield from (f"tools[{number}].{name}" for name in tool.unknown_fields())


def as_values(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as chat templates know them: without what is not set."""
    return [{"type": "function", "function": tool.function.model_dump(exclude_none=True)} for tool in tools]


def schemas(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """The schemas of the tools' parameters, by name."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


def custom_names(tools: Sequence[Tool]) -> frozenset[str]:
    """The names of the tools whose input is text."""
    return frozenset(tool.custom.name for tool in tools if isinstance(tool, CustomTool))


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raises ApiError for a choice of no such tool, and for two tools of one name."""
    names: set[str] = set()
    for tool in tools:
        if (name := tool.function.name) in names:
            words = f"Invalid 'tools': there are two of the name '{name}'."
            raise invalid(words, f"tools[{tool._number}].{tool.type}.name")
        names.add(name)
    if isinstance(choice, NamedChoice) and choice.name not in names:
        raise no_such_tool(choice.name)
    if not tools and choice == "required":
        raise invalid("Invalid 'tool_choice': there are no 'tools' to choose from.", "tool_choice", "invalid_value")


def no_such_tool(name: str) -> ApiError:
    """The error for a choice of a tool that is not among the tools."""
    message = f"Invalid 'tool_choice': there is no tool '{name[:64]}' in 'tools'."
    return invalid(message, "tool_choice", "invalid_value")
