"""The fields of structural tags: answers of several forms, and of text between them.

Both notations of vLLM: the current one is xgrammar's (https://xgrammar.mlc.ai/docs, "Structural Tag"), of formats in
formats; the older one has the tags that triggers begin. What has no sound counterpart here is refused by its name.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, model_validator
from pydantic import Tag as Choice
from pydantic_core import PydanticCustomError

from services.gateway.api.requests.form_texts import MAX_CHARS, Text
from services.gateway.api.requests.strict import Strict

MAX_PARTS = 256  # formats of one structural tag, each list of them, and each list of strings

_Mark = Annotated[str, Field(max_length=1024)]
_Begin = Annotated[str, Field(min_length=1, max_length=1024)]
_Marks = Annotated[list[_Begin], Field(max_length=MAX_PARTS)]
_Formats = Annotated[list["Format"], Field(min_length=1, max_length=MAX_PARTS)]


def _schema(value: object) -> object:
    if not isinstance(value, (dict, bool)):
        raise PydanticCustomError("schema_type", "It must be an object or a boolean.")
    return value


def _one_or_several(value: object) -> str:
    return "(several)" if isinstance(value, list) else "(one)"


class ConstString(Strict):
    """Exactly this text."""

    type: Literal["const_string"]
    value: Annotated[str, Field(max_length=MAX_CHARS)]


class JsonSchema(Strict):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any] | bool, BeforeValidator(_schema)]
    style: Literal["json"] | None = None
    any_order: Literal[False] | None = None


class Regex(Strict):
    """Text that matches a regular expression."""

    type: Literal["regex"]
    pattern: Text


class GrammarText(Strict):
    """Text that a grammar describes, in Lark's notation or GBNF."""

    type: Literal["grammar"]
    grammar: Text


class AnyText(Strict):
    """Any text without certain strings, up to the end of the tag around it, or of the answer."""

    type: Literal["any_text"]
    excludes: _Marks | None = None


class Sequence(Strict):
    """Formats, one after the other."""

    type: Literal["sequence"]
    elements: _Formats


class Either(Strict):
    """One of these formats."""

    type: Literal["or"]
    elements: _Formats


class Repeated(Strict):
    """A format so often."""

    type: Literal["optional", "star", "plus"]
    content: "Format"


class Tag(Strict):
    """A format between marks. end: or one of several."""

    type: Literal["tag"] = "tag"
    begin: _Mark
    content: "Format"
    end: Annotated[
        Annotated[_Mark, Choice("(one)")]
        | Annotated[list[_Mark], Field(min_length=1, max_length=16), Choice("(several)")],
        Discriminator(_one_or_several),
    ]

    @property
    def ends(self) -> tuple[str, ...]:
        """The marks, one of which ends the content; none where nothing does."""
        ends = (self.end,) if isinstance(self.end, str) else tuple(self.end)
        return () if ends == ("",) else ends


_Tags = Annotated[list[Tag], Field(min_length=1, max_length=MAX_PARTS)]


class TriggeredTags(Strict):
    """Any text, in which each trigger begins one of its tags."""

    type: Literal["triggered_tags"]
    triggers: Annotated[list[_Begin], Field(min_length=1, max_length=MAX_PARTS)]
    tags: _Tags
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: _Marks | None = None


class SeparatedTags(Strict):
    """Tags, with a separator between them and no other text."""

    type: Literal["tags_with_separator"]
    tags: _Tags
    separator: _Mark
    at_least_one: bool = False
    stop_after_first: bool = False


_REPEATED = ("optional", "star", "plus")
_TYPES = (
    "const_string",
    "json_schema",
    "regex",
    "grammar",
    "any_text",
    "sequence",
    "or",
    *_REPEATED,
    "tag",
    "triggered_tags",
    "tags_with_separator",
)


def _type(value: object) -> object:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _choice(value: object) -> str:
    """Returns the choice for a format's type. The parentheses keep it out of the paths of fields."""
    kind = _type(value)
    return "(repeated)" if kind in _REPEATED else f"({kind})"


def _known(value: object) -> object:
    kind = _type(value)
    if not isinstance(kind, str):
        raise PydanticCustomError("format_type", "It must be an object with a 'type'.")
    if kind not in _TYPES:
        words = "Formats of type '{kind}' are not supported by this server, only {known}."
        raise PydanticCustomError("unsupported", words, {"kind": kind[:64], "known": ", ".join(_TYPES)})
    return value


Format = Annotated[
    Annotated[ConstString, Choice("(const_string)")]
    | Annotated[JsonSchema, Choice("(json_schema)")]
    | Annotated[Regex, Choice("(regex)")]
    | Annotated[GrammarText, Choice("(grammar)")]
    | Annotated[AnyText, Choice("(any_text)")]
    | Annotated[Sequence, Choice("(sequence)")]
    | Annotated[Either, Choice("(or)")]
    | Annotated[Repeated, Choice("(repeated)")]
    | Annotated[Tag, Choice("(tag)")]
    | Annotated[TriggeredTags, Choice("(triggered_tags)")]
    | Annotated[SeparatedTags, Choice("(tags_with_separator)")],
    Discriminator(_choice),
    BeforeValidator(_known),
]


class Structure(Strict):
    """A tag of the older notation."""

    model_config = ConfigDict(populate_by_name=True)

    begin: _Mark
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    end: _Mark


class TagFields(Strict):
    """The fields of both notations, wherever structural tags are asked for."""

    format: Format | None = None
    structures: Annotated[list[Structure], Field(min_length=1, max_length=MAX_PARTS)] | None = None
    triggers: Annotated[list[_Begin], Field(min_length=1, max_length=MAX_PARTS)] | None = None

    def root(self) -> Format:
        """Returns the whole tag in the current notation. The fields are those of one."""
        if self.format is not None:
            return self.format
        assert self.structures is not None
        assert self.triggers is not None
        tags = [
            Tag(
                begin=each.begin,
                content=JsonSchema(type="json_schema", json_schema=each.json_schema or {}),
                end=each.end,
            )
            for each in self.structures
        ]
        return TriggeredTags(type="triggered_tags", triggers=self.triggers, tags=tags)

    def check_one_notation(self) -> None:
        """Raises PydanticCustomError unless the fields are those of one notation."""
        older = self.structures is not None and self.triggers is not None
        if (self.format is not None) + older != 1 or (self.structures is None) != (self.triggers is None):
            words = "A structural tag has either 'format', or 'structures' and 'triggers'."
            raise PydanticCustomError("structural_tag", words)


class StructuralTag(TagFields):
    """A structural tag as `structured_outputs` has it."""

    type: Literal["structural_tag"] = "structural_tag"

    @model_validator(mode="after")
    def _one_notation(self) -> Self:
        self.check_one_notation()
        return self
