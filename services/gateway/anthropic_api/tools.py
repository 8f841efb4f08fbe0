"""The tools of requests: the client's own, and those that a vendor defines, which are left out."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.anthropic_api.blocks import NAME
from services.gateway.api.requests.hints import Hinting
from services.gateway.api.requests.strict import Nested, Open
from services.gateway.api.requests.tools import MAX_TOOLS

_OWN = "custom"


class Tool(Hinting, Nested):
    """A tool of the client's own."""

    hints: ClassVar[frozenset[str]] = frozenset(
        {"type", "allowed_callers", "defer_loading", "eager_input_streaming", "input_examples"}
    )

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    # They ask for what is always so.
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None


class VendorTool(Open):
    """A tool without a schema, since its vendor's servers run it, or its vendor's models alone know how to call it."""

    type: str
    name: str | None = None

    def unknown_fields(self) -> Iterator[str]:
        """See Open. The whole of the tool is left out."""
        return iter(())


def _whose(value: object) -> str:
    """Returns the tag of a tool. The parentheses keep it out of the paths of fields."""
    if not isinstance(value, Mapping) or "input_schema" in value:
        return "(own)"
    return "(own)" if value.get("type") in (None, _OWN) else "(vendor)"


AnyTool = Annotated[Annotated[Tool, Tag("(own)")] | Annotated[VendorTool, Tag("(vendor)")], Discriminator(_whose)]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ToolChoice(Nested):
    """The tools that the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _name_of_a_tool(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("tool_choice_name", "'name' goes with the type 'tool', and with no other.")
        return self

    @property
    def must_call(self) -> bool:
        """True where the answer has to have a call."""
        return self.type in ("any", "tool")
