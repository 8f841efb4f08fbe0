"""The content blocks of requests, as typed values. What is not text, a call of a tool or thinking is refused."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from services.gateway.api.strict import Nested

MAX_BLOCKS = 2048  # of one message

NAME = r"^[a-zA-Z0-9_-]{1,128}$"


class CacheControl(Nested):
    """A mark where a prompt may be cached, which asks for nothing: every prompt's prefixes are."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Nested):
    """The base of content blocks."""

    cache_control: CacheControl | None = None


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Block):
    """An earlier answer's reasoning. Signatures are not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Block):
    """An earlier answer's reasoning that another server encrypted. Nothing can be done with it."""

    type: Literal["redacted_thinking"]
    data: str

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield "data"
        yield from super().unknown_fields()


class ToolUseBlock(Block):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(pattern=NAME)]
    input: dict[str, Any]
    # Whose call it was, which answers of Anthropic's own say.
    caller: dict[str, Any] | None = None
    toolset_name: str | None = None


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
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list) or value is None:
        return value
    raise PydanticCustomError("content_type", "It must be a string or a list of content blocks.")


_SEVERAL = Field(max_length=MAX_BLOCKS, fail_fast=True)

OnlyText = Annotated[TextBlock, known_type("blocks", "text")]
_TextsJson = str | Annotated[list[OnlyText], _SEVERAL]  # as they come
Texts = Annotated[list[OnlyText], _SEVERAL, BeforeValidator(_as_blocks, json_schema_input_type=_TextsJson)]


class ToolResultBlock(Block):
    """The result of a call of a tool."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: Texts | None = None
    is_error: bool | None = None


def _tag(value: object) -> str | None:
    """Returns the tag of a block's type. The parentheses keep it out of the paths of fields."""
    kind = value.get("type") if isinstance(value, dict) else None
    return f"({kind})" if isinstance(kind, str) else None


_KINDS = (
    Annotated[TextBlock, Tag("(text)")]
    | Annotated[ToolUseBlock, Tag("(tool_use)")]
    | Annotated[ToolResultBlock, Tag("(tool_result)")]
    | Annotated[ThinkingBlock, Tag("(thinking)")]
    | Annotated[RedactedThinkingBlock, Tag("(redacted_thinking)")]
)
_BY_TYPE = Discriminator(_tag, "block_type", "It must be an object with a 'type'.")
AnyBlock = Annotated[
    _KINDS, _BY_TYPE, known_type("blocks", "text", "tool_use", "tool_result", "thinking", "redacted_thinking")
]
_BlocksJson = str | Annotated[list[AnyBlock], _SEVERAL]  # as they come
Blocks = Annotated[list[AnyBlock], _SEVERAL, BeforeValidator(_as_blocks, json_schema_input_type=_BlocksJson)]
