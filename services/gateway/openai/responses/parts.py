"""The parts of items: texts, and what a model that reads text can do nothing with.

A history is sent again with every request, so what an earlier turn had is read generously: null and an empty list are
no text, and media in a function's output become a line that says so.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from services.gateway.api.requests.content_parts import as_text
from services.gateway.api.requests.strict import Open

_TEXTS = ("input_text", "output_text", "text")


def _or_empty(value: object) -> object:
    return "" if value is None else value


class TextPart(Open):
    """A text of a message, or of a function's output.

    annotations, logprobs: those of an earlier answer, which a client may send back; nothing reads them.
    """

    type: Literal["input_text", "output_text", "text"]
    text: Annotated[str, BeforeValidator(_or_empty)]
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class OtherPart(Open):
    """A part of an earlier turn that is no text. Whoever holds it names it."""

    type: Annotated[str, Field(json_schema_extra={"not": {"enum": [*_TEXTS]}})]

    @property
    def text(self) -> str:
        """The words of a refusal; else a line that stands where the part was, for the model to know of it."""
        return str(as_text({**(self.model_extra or {}), "type": self.type})["text"])

    def unknown_fields(self) -> Iterator[str]:
        """See Open. The whole part is left out, not fields of it."""
        return iter(())


def _tag(value: object) -> str | None:
    """Returns the tag of a part. The parentheses keep it out of the paths of fields."""
    kind = value.get("type", "text") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return None
    return "(text)" if kind in _TEXTS else "(other)"


def _as_parts(value: object) -> object:
    if not value and (value is None or isinstance(value, str)):
        return []
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _as_output(value: object) -> object:
    """Takes what programs have for the output of a function: a text, parts, or any JSON value."""
    if isinstance(value, list) and all(isinstance(part, dict) and "type" in part for part in value):
        return value
    return _as_parts(value if value is None or isinstance(value, str) else orjson.dumps(value).decode())


def _only_text(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in _TEXTS:
        raise PydanticCustomError("unsupported", "Parts of type '{kind}' are not supported.", {"kind": kind[:64]})
    return value


_SEVERAL = Field(fail_fast=True)
AnyPart = TextPart | OtherPart
_AnyPart = Annotated[
    Annotated[TextPart, Tag("(text)")] | Annotated[OtherPart, Tag("(other)")],
    Discriminator(_tag, "part_type", "It must be an object with a 'type'."),
]
_Texts = Annotated[list[Annotated[_AnyPart, BeforeValidator(_only_text)]], _SEVERAL]
_Parts = Annotated[list[_AnyPart], _SEVERAL]

# Of a turn that asks: an image in it is a demand.
Texts = Annotated[_Texts, BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart] | None)]
# Of an earlier answer.
Parts = Annotated[_Parts, BeforeValidator(_as_parts, json_schema_input_type=str | _Parts | None)]
# Of a function or a custom tool.
OutputParts = Annotated[_Parts, BeforeValidator(_as_output, json_schema_input_type=Any)]


def unknown_part_fields(parts: Sequence[TextPart | OtherPart], name: str) -> Iterator[str]:
    """Yields the paths of parts that are left out, and of fields that nothing acts on: `content[0].cache`."""
    for number, part in enumerate(parts):
        if not isinstance(part, OtherPart):
            yield from (f"{name}[{number}].{field}" for field in part.unknown_fields())
        elif part.type != "refusal":
            yield f"{name}[{number}]"
