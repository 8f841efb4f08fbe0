"""The body of POST /v1/responses as typed values, every field checked.

The fields that chats have too come from CommonRequest; those that are called otherwise here are refused by name.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.api.errors import invalid, unsupported
from services.gateway.api.requests.hints import Hinting
from services.gateway.api.requests.schema import AnswerTokens, CommonRequest, TokenCount, Top, TopOrAll, WholeNumber
from services.gateway.api.requests.strict import Strict
from services.gateway.api.requests.structured import ResponseFormat
from services.gateway.openai.responses.input_items import InputItem, unknown_item_fields
from services.gateway.openai.responses.items import MAX_ITEMS
from services.gateway.openai.responses.tools import AnyToolChoice, Tools, unknown_tool_fields

LOGPROBS = "message.output_text.logprobs"

# Common fields for which a response has no place.
_NO_PLACE = ("echo", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids")
# Fields of a chat that have another name here.
_ELSEWHERE = {"max_tokens": "max_output_tokens", "response_format": "text.format"}


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(Strict):
    """The form of the answer."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if self.type == "json_schema" and (self.name is None or self.json_schema is None):
            raise PydanticCustomError("json_schema", "The type 'json_schema' needs 'name' and 'schema'.")
        if self.type != "json_schema" and (self.name is not None or self.json_schema is not None):
            raise PydanticCustomError("json_schema", "'name' and 'schema' go with the type 'json_schema' alone.")
        return self

    def as_json(self) -> dict[str, Any]:
        """Returns the format as clients send it."""
        return self.model_dump(by_alias=True, exclude_none=True)


class TextOptions(Hinting):
    """OpenAI's `text`."""

    hints: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Hinting):
    """OpenAI's `reasoning`. Answers show the reasoning itself, so a summary may only be wished for by `auto`."""

    hints: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary"})

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


_Items = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
_ONLY_NULL = WithJsonSchema({"type": "null", "description": "A response has no place for it, or another name."})
_ONLY_FALSE = WithJsonSchema({"enum": [False, None]})


class ResponsesRequest(CommonRequest):
    """A conversation, of which the assistant's next items are wanted."""

    prompt_param: ClassVar[str] = "input"
    top_params: ClassVar[tuple[str, ...]] = ("top_logprobs",)

    input: Annotated[_Items, BeforeValidator(_as_items, json_schema_input_type=str | _Items)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    store: bool | None = None
    text: TextOptions | None = None
    tools: Tools | None = None
    tool_choice: AnyToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    # Refused by name, in check_combinations.
    max_tokens: Annotated[AnswerTokens | None, _ONLY_NULL] = None
    response_format: Annotated[ResponseFormat | None, _ONLY_NULL] = None
    n: Annotated[WholeNumber | None, WithJsonSchema({"enum": [1, None]})] = None
    echo: Annotated[bool | None, _ONLY_FALSE] = None
    prompt_logprobs: Annotated[TopOrAll | None, _ONLY_NULL] = None
    return_token_ids: Annotated[bool | None, _ONLY_FALSE] = None
    return_tokens_as_token_ids: Annotated[bool | None, _ONLY_FALSE] = None
    include: list[str] | None = None
    top_logprobs: Top | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    max_tool_calls: TokenCount | None = None  # of built-in tools, of which there are none

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        for name in ("text", "reasoning"):
            if (part := getattr(self, name)) is not None:
                yield from (f"{name}.{field}" for field in part.unknown_fields())
        yield from unknown_item_fields(self.input)
        yield from unknown_tool_fields(self.tools or ())
        yield from (f"include[{number}]" for number, name in enumerate(self.include or ()) if name != LOGPROBS)

    @property
    def asked_tokens(self) -> int | None:
        """See CommonRequest."""
        return self.max_output_tokens

    def default_tokens(self, room: int) -> int:
        """See CommonRequest: an answer may fill the context."""
        return room

    @property
    def num_logprobs(self) -> int | None:
        """See CommonRequest."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    def check_combinations(self) -> None:
        """See CommonRequest."""
        super().check_combinations()
        for name, here in _ELSEWHERE.items():
            if getattr(self, name) is not None:
                raise unsupported(name, f"'{name}' is called '{here}' in this API.")
        for name in _NO_PLACE:
            if (value := getattr(self, name)) is not None and value is not False:
                raise unsupported(name, f"'{name}' is not supported here: a response has no place for it.")
        if self.continuous_usage:
            words = "'continuous_usage_stats' is not supported here: the usage comes with a stream's last event."
            raise unsupported("stream_options", words)
        if self.background and self.store is False:
            raise invalid(
                "'background' needs a response that is kept: 'store' must be true, or left out.", "background"
            )
        if self.n not in (None, 1):
            raise unsupported("n", "A response has one choice: 'n' must be 1, or left out.")
        if self.top_logprobs and self.num_logprobs is None:
            raise invalid(f"'top_logprobs' is only allowed when 'include' has '{LOGPROBS}'.", "top_logprobs")
