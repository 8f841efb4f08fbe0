"""Structured output in requests: the fields by which one asks for the form of its answer."""

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.api.requests.form_texts import MAX_CHARS, MAX_CHOICES, JsonStyle, Text
from services.gateway.api.requests.strict import Strict
from services.gateway.api.requests.structural_tag import StructuralTag, TagFields


def _from_json(value: object) -> object:
    """Reads a structural tag that is text, as vLLM's clients send it."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_CHARS:
        raise PydanticCustomError("string_too_long", "It must have at most {limit} characters.", {"limit": MAX_CHARS})
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise PydanticCustomError("structural_tag", "It is not valid JSON.") from error


class JsonSchemaFormat(Strict):
    """The `json_schema` of a `response_format`. Answers match the schema also where `strict` is not true."""

    model_config = ConfigDict(populate_by_name=True)

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(TagFields):
    """OpenAI's `response_format`, with vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _fields_where_they_belong(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            words = "'json_schema' goes with the type of that name, and with no other."
            raise PydanticCustomError("json_schema_type", words)
        if self.type == "structural_tag":
            self.check_one_notation()
        elif any(each is not None for each in (self.format, self.structures, self.triggers)):
            words = "'format', 'structures' and 'triggers' go with the type 'structural_tag'."
            raise PydanticCustomError("structural_tag_type", words)
        return self


_TagJson = StructuralTag | Text | None  # as it comes


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: one of these forms, and how JSON in it is written.

    disable_fallback: asks for what is always so, as there is one grammar engine.
    """

    model_config = ConfigDict(populate_by_name=True)

    json_schema: Annotated[dict[str, Any] | Text | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Text | None = None
    structural_tag: Annotated[StructuralTag | None, BeforeValidator(_from_json, json_schema_input_type=_TagJson)] = None
    whitespace_pattern: Annotated[str, Field(max_length=1024)] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        with_json = (self.json_schema, self.json_object or None, self.structural_tag)
        others = (self.regex, self.choice, self.grammar)
        if sum(each is not None for each in (*with_json, *others)) != 1:
            kinds = "json, json_object, regex, choice, grammar, structural_tag"
            raise PydanticCustomError("structured_outputs", "It must have exactly one of {kinds}.", {"kinds": kinds})
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            words = "'whitespace_pattern' and 'disable_any_whitespace' exclude each other."
            raise PydanticCustomError("structured_outputs", words)
        if self.style != JsonStyle() and all(each is None for each in with_json):
            words = "How JSON is written goes with 'json', 'json_object' and 'structural_tag'."
            raise PydanticCustomError("structured_outputs", words)
        return self

    @property
    def style(self) -> JsonStyle:
        """The style in which JSON is written."""
        return JsonStyle(
            whitespace=self.whitespace_pattern,
            spaces=not self.disable_any_whitespace,
            closed=bool(self.disable_additional_properties),
        )
