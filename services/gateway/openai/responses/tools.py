"""The tools of a request, and which of them an answer calls.

Functions and custom tools are run by the client, whether they stand alone or in a namespace. Any other tool is one that
only a vendor's servers run: a hint, which is left out and named.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.api.requests.form_texts import Text
from services.gateway.api.requests.strict import Open, Strict
from services.gateway.api.requests.tools import MAX_TOOLS, Name


class FunctionTool(Open):
    """A function that the model may call. strict: its arguments match `parameters`, a JSON Schema."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self, name: str, description: str | None) -> dict[str, Any]:
        """Returns the tool of a chat, with the name and the description that the model sees."""
        about = {"name": name, "description": description, "parameters": self.parameters, "strict": self.strict}
        return {"type": "function", "function": {key: value for key, value in about.items() if value is not None}}


class InputFormat(Strict):
    """The form of a custom tool's input: any text, or one that matches a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None

    @model_validator(mode="after")
    def _grammar_where_it_belongs(self) -> Self:
        if any((self.type == "grammar") != (each is not None) for each in (self.syntax, self.definition)):
            words = "'syntax' and 'definition' go with the type 'grammar', and with no other."
            raise PydanticCustomError("input_format", words)
        return self

    def for_chat(self) -> dict[str, Any]:
        """Returns the form in the words of a chat."""
        if self.type == "text":
            return {"type": "text"}
        return {"type": "grammar", "grammar": {"syntax": self.syntax, "definition": self.definition}}


class CustomTool(Open):
    """A tool that the model may call with an input, which is text."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: InputFormat | None = None

    def for_chat(self, name: str, description: str | None) -> dict[str, Any]:
        """See FunctionTool."""
        about = {"name": name, "description": description, "format": self.format and self.format.for_chat()}
        return {"type": "custom", "custom": {key: value for key, value in about.items() if value is not None}}


_KINDS = ("function", "custom", "namespace")


class HostedTool(Open):
    """A tool that only a vendor's servers run. Whoever holds it names it."""

    type: Annotated[str, Field(json_schema_extra={"not": {"enum": [*_KINDS]}})]

    def unknown_fields(self) -> Iterator[str]:
        """See Open. The whole tool is left out, not fields of it."""
        return iter(())


def _kind(value: object) -> str | None:
    """Returns the tag of a tool. The parentheses keep it out of the paths of fields."""
    kind = value.get("type", "function") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(kind, str):
        return None
    return f"({kind})" if kind in _KINDS else "(hosted)"


_TYPED = Discriminator(_kind, "tool_type", "It must be an object with a 'type'.")
_Function = Annotated[FunctionTool, Tag("(function)")]
_Custom = Annotated[CustomTool, Tag("(custom)")]
_Hosted = Annotated[HostedTool, Tag("(hosted)")]


class NamespaceTool(Open):
    """Tools under one name."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[Annotated[_Function | _Custom | _Hosted, _TYPED]], Field(max_length=MAX_TOOLS)]

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        yield from unknown_tool_fields(self.tools)


AnyTool = Annotated[_Function | _Custom | _Hosted | Annotated[NamespaceTool, Tag("(namespace)")], _TYPED]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)]


def unknown_tool_fields(tools: Sequence[FunctionTool | CustomTool | HostedTool | NamespaceTool]) -> Iterator[str]:
    """Yields the paths of tools that are left out, and of fields that nothing acts on: `tools[0].cache`."""
    for number, tool in enumerate(tools):
        if isinstance(tool, HostedTool):
            yield f"tools[{number}]"
        else:
            yield from (f"tools[{number}].{name}" for name in tool.unknown_fields())


class AllowedTool(Open):
    """A tool that a choice allows. name: None for a tool without one, which no answer calls."""

    type: str
    name: str | None = None
    namespace: str | None = None


_CHOICES = ("none", "auto", "required", "function", "custom", "allowed_tools")


def _as_choice(value: object) -> object:
    if isinstance(value, str):
        return {"type": value}
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in _CHOICES:
        words = "No tool of type '{kind}' can be called: only the vendor's servers run it."
        raise PydanticCustomError("unsupported", words, {"kind": kind[:64]})
    return value


class ToolChoice(Strict):
    """OpenAI's `tool_choice`; its three words are types here."""

    type: Literal["none", "auto", "required", "function", "custom", "allowed_tools"]
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedTool], Field(max_length=MAX_TOOLS)] | None = None

    @model_validator(mode="after")
    def _fields_where_they_belong(self) -> Self:
        named, allowed = self.type in ("function", "custom"), self.type == "allowed_tools"
        if named != (self.name is not None) or (self.namespace is not None and not named):
            words = "'name' goes with the types 'function' and 'custom', and with no other."
            raise PydanticCustomError("tool_choice", words)
        if any(allowed != (each is not None) for each in (self.mode, self.tools)):
            words = "'mode' and 'tools' go with the type 'allowed_tools', and with no other."
            raise PydanticCustomError("tool_choice", words)
        return self

    def as_json(self) -> str | dict[str, Any]:
        """Returns the choice as clients send it."""
        return self.type if self.type in ("none", "auto", "required") else self.model_dump(exclude_none=True)


_ToolChoiceJson = Literal["none", "auto", "required"] | ToolChoice | None  # as it comes
AnyToolChoice = Annotated[ToolChoice | None, BeforeValidator(_as_choice, json_schema_input_type=_ToolChoiceJson)]
