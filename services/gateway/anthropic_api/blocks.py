"""The content blocks of requests, as typed values.

A history is sent again with every request, so it is read generously: what a model that reads text can do nothing with
is left out and named, and a text that is null is an empty one.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from services.gateway.anthropic_api.other_blocks import OtherBlock
from services.gateway.api.requests.strict import Nested

MAX_BLOCKS = 2048  # of one message

NAME = r"^[a-zA-Z0-9_-]{1,128}$"


class Block(Nested):
    """The base of content blocks. cache_control: asks for what is always so, in whatever form."""

    cache_control: Any = None


class TextBlock(Block):
    """Text. citations: of an earlier answer, or a wish for some; they are left out, and named."""

    type: Literal["text"]
    text: str | None
    citations: Any = None

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        if self.citations:
            yield "citations"


class ThinkingBlock(Block):
    """An earlier answer's reasoning. Signatures are not checked."""

    type: Literal["thinking"]
    thinking: str | None
    signature: Any = None


def _as_id(value: object) -> object:
    return "" if value is None else str(value) if isinstance(value, int) else value


# Of a call, as whichever server wrote it; "" where none did.
Id = Annotated[str, BeforeValidator(_as_id)]


class ToolUseBlock(Block):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: Id = ""
    name: str
    input: Any = None
    # Whose call it was, which answers of Anthropic's own say.
    caller: Any = None
    toolset_name: Any = None


def known_type(what: str, *known: str) -> BeforeValidator:
    """Returns a validator that refuses objects of other types by the type's name. `what`: their name in the plural."""

    def check(value: object) -> object:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in known:
            words = "{what} of type '{kind}' are not supported by this server, only {known}."
            named = {"what": what, "kind": kind[:64], "known": ", ".join(known)}
            raise PydanticCustomError("unsupported", words, named)
        return value

    return BeforeValidator(check)


def _as_blocks(value: object) -> object:
    if not value and (value is None or isinstance(value, str)):
        return []
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return value
    raise PydanticCustomError("content_type", "It must be a string or a list of content blocks.")


_SEVERAL = Field(max_length=MAX_BLOCKS, fail_fast=True)

OnlyText = Annotated[TextBlock, known_type("blocks", "text")]
_TextsJson = str | Annotated[list[OnlyText], _SEVERAL] | None  # as they come
Texts = Annotated[list[OnlyText], _SEVERAL, BeforeValidator(_as_blocks, json_schema_input_type=_TextsJson)]


def _tag(known: frozenset[str]) -> Discriminator:
    """Returns what finds the tag of a block's type. The parentheses keep a tag out of the paths of fields."""

    def tag(value: object) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            return None
        return f"({kind})" if kind in known else "(other)"

    return Discriminator(tag, "block_type", "It must be an object with a 'type'.")


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("(text)")] | Annotated[OtherBlock, Tag("(other)")], _tag(frozenset({"text"}))
]
_ResultJson = str | Annotated[list[ResultBlock], _SEVERAL] | None  # as it comes


class ToolResultBlock(Block):
    """The result of a call of a tool."""

    type: Literal["tool_result"]
    tool_use_id: Id = ""
    content: Annotated[list[ResultBlock], _SEVERAL, BeforeValidator(_as_blocks, json_schema_input_type=_ResultJson)] = (
        Field(default_factory=list)
    )
    is_error: bool | None = None
    toolset_name: Any = None

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        for number, block in enumerate(self.content):
            if isinstance(block, OtherBlock) and block.text is None:
                yield f"content[{number}]"


_KINDS = (
    Annotated[TextBlock, Tag("(text)")]
    | Annotated[ToolUseBlock, Tag("(tool_use)")]
    | Annotated[ToolResultBlock, Tag("(tool_result)")]
    | Annotated[ThinkingBlock, Tag("(thinking)")]
    | Annotated[OtherBlock, Tag("(other)")]
)
AnyBlock = Annotated[_KINDS, _tag(frozenset({"text", "tool_use", "tool_result", "thinking"}))]
_BlocksJson = str | Annotated[list[AnyBlock], _SEVERAL] | None  # as they come
Blocks = Annotated[list[AnyBlock], _SEVERAL, BeforeValidator(_as_blocks, json_schema_input_type=_BlocksJson)]
