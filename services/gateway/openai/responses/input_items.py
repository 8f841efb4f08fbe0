"""The items of a request's `input`: those of a conversation, references to them, and others, which are left out."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from services.gateway.api.requests.strict import Open
from services.gateway.openai.responses.items import (
    AnswerItem,
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    Id,
    Item,
    MessageItem,
    ReasoningItem,
    ToolsItem,
)

_KINDS = (
    "additional_tools",
    "custom_tool_call",
    "custom_tool_call_output",
    "function_call",
    "function_call_output",
    "item_reference",
    "message",
    "reasoning",
)


class ItemReference(Open):
    """An item of an earlier answer, in the place of which it stands."""

    model_config = ConfigDict(json_schema_extra={"not": {"required": ["role"]}})

    type: Literal["item_reference"] = "item_reference"
    id: Id


class OtherItem(Open):
    """An item of another type, that only a vendor's servers write or read. Whoever holds it names it."""

    type: Annotated[str, Field(json_schema_extra={"not": {"enum": [*_KINDS]}})]

    def unknown_fields(self) -> Iterator[str]:
        """See Open. The whole item is left out, not fields of it."""
        return iter(())


def _kind(value: object) -> str:
    """Returns the tag of an item. The parentheses keep it out of the paths of fields."""
    if not isinstance(value, dict):
        return "(message)"  # which says what is wrong
    kind, role = value.get("type"), value.get("role")
    if kind is None:
        kind = "item_reference" if value.keys() == {"id"} else "message"
    if kind == "message":
        return "(answer)" if role == "assistant" else "(message)"
    if kind in ("function_call_output", "custom_tool_call_output"):
        return "(output)"
    return f"({kind})" if kind in _KINDS else "(other)"


def _an_object(value: object) -> object:
    if not isinstance(value, dict):
        raise PydanticCustomError("item_type", "An item must be an object.")
    return value


InputItem = Annotated[
    Annotated[MessageItem, Tag("(message)")]
    | Annotated[AnswerItem, Tag("(answer)")]
    | Annotated[FunctionCallItem, Tag("(function_call)")]
    | Annotated[CustomCallItem, Tag("(custom_tool_call)")]
    | Annotated[CallOutputItem, Tag("(output)")]
    | Annotated[ReasoningItem, Tag("(reasoning)")]
    | Annotated[ToolsItem, Tag("(additional_tools)")]
    | Annotated[ItemReference, Tag("(item_reference)")]
    | Annotated[OtherItem, Tag("(other)")],
    Discriminator(_kind),
    BeforeValidator(_an_object),
]


def of_conversation(items: Sequence[Item | ItemReference | OtherItem]) -> list[Item]:
    """Returns the items that a model reads. References among them have been resolved."""
    return [item for item in items if not isinstance(item, ItemReference | OtherItem)]


def unknown_item_fields(items: Sequence[Item | ItemReference | OtherItem]) -> Iterator[str]:
    """Yields the paths of items that are left out, and of fields that nothing acts on: `input[0].name`."""
    for number, item in enumerate(items):
        if isinstance(item, OtherItem):
            yield f"input[{number}]"
        else:
            yield from (f"input[{number}].{name}" for name in item.unknown_fields())
