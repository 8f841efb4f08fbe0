"""Structured output: the form that a request asks its answer to have, as a grammar for the workers.

What a client sends is turned into one of llguidance's notations, and compiled once in a process that has limits: a
grammar that is wrong or too costly is refused with the library's words, before any work is done for it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.api.errors import invalid, unavailable
from services.gateway.api.forms import (
    MAX_CHARS,
    MAX_CHOICES,
    MAX_REASON,
    JsonStyle,
    Text,
    of_choices,
    of_grammar,
    of_regex,
    of_schema,
    too_large,
    wrong,
)
from services.gateway.api.strict import Strict
from services.gateway.api.structural_tag import StructuralTag, TagFields
from services.gateway.api.tag_grammar import of_tag
from services.gateway.side.frames import JobEnd, JobKind
from services.gateway.side.processes import LONGEST_S, MEMORY_BYTES, JobFailed, NoJobs, SideProcesses
from services.protocol.sampling import MAX_GRAMMAR

_MAX_KNOWN = 4096  # grammars that are known to be right or wrong
_DIGEST_BYTES = 32
_TOO_COSTLY = {  # by: it was the time
    True: f"it takes longer than {LONGEST_S:g} s to follow it for one token",
    False: f"it takes more than {MEMORY_BYTES >> 20} MiB to follow it for one token",
}
_NO_TOKENS: Mapping[str, int] = {}


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


def grammar_of(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    tokens: Mapping[str, int] = _NO_TOKENS,
) -> tuple[str, str]:
    """Returns the grammar of the answer, and the field that it comes from; both empty where any answer will do.

    tokens: those that marks may have (`Tokenizer.marks`). Raises ApiError. A grammar of some size takes long to
    translate: this is not for the event loop.
    """
    grammar, param = _grammar_of(response_format, structured, tokens)
    if len(grammar) > MAX_GRAMMAR:  # a translation is longer than what the client wrote
        raise too_large(param, "the grammar that it becomes is too large.")
    return grammar, param


def _grammar_of(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, tokens: Mapping[str, int]
) -> tuple[str, str]:
    if response_format is not None and response_format.type != "text":
        if structured is not None:
            raise invalid("'response_format' and 'structured_outputs' exclude each other.", "structured_outputs")
        return _of_format(response_format, tokens), "response_format"
    if structured is None:
        return "", ""
    return _of_structured(structured, tokens), "structured_outputs"


def _of_format(wanted: ResponseFormat, tokens: Mapping[str, int]) -> str:
    if wanted.type == "structural_tag":
        return of_tag(wanted.root(), JsonStyle(), tokens, "response_format")
    named = wanted.json_schema
    schema = {"type": "object"} if named is None or named.json_schema is None else named.json_schema
    return of_schema(schema, JsonStyle(), "response_format")


def _of_structured(wanted: StructuredOutputs, tokens: Mapping[str, int]) -> str:
    if wanted.json_schema is not None:
        return of_schema(wanted.json_schema, wanted.style, "structured_outputs.json")
    if wanted.regex is not None:
        return of_regex(wanted.regex)
    if wanted.choice is not None:
        return of_choices(wanted.choice, "structured_outputs.choice")
    if wanted.grammar is not None:
        return of_grammar(wanted.grammar, "structured_outputs.grammar")
    if wanted.structural_tag is not None:
        return of_tag(wanted.structural_tag.root(), wanted.style, tokens, "structured_outputs.structural_tag")
    return of_schema({"type": "object"}, wanted.style, "structured_outputs")


@dataclass(slots=True)
class _Running:
    """A check that runs. num_waiting: those who asked for it and still wait."""

    reason: "asyncio.Task[str]"
    num_waiting: int = 0


class GrammarChecks:
    """Has grammars followed for one token before they are sent to workers, in processes that have limits.

    What was found is kept, of those that were refused as well. All of a tenant who ask for one grammar at a time wait
    for one job; tenants do not, since the job of another may be behind all else of that tenant.
    """

    def __init__(self, processes: SideProcesses) -> None:
        self._processes = processes
        self._known: OrderedDict[bytes, str] = OrderedDict()  # why not, or empty, by digest; least recently used first
        self._running: dict[tuple[bytes, str], _Running] = {}  # by digest and tenant

    async def check(self, grammar: str, param: str, tenant: str) -> None:
        """Raises ApiError for a grammar that workers could not follow. `param`: the field that it comes from."""
        digest = blake2b(grammar.encode(), digest_size=_DIGEST_BYTES).digest()
        if digest not in self._known:
            self._known[digest] = await self._shared(digest, grammar, tenant)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(digest)
        if reason := self._known[digest]:
            raise wrong(param, reason)

    async def _shared(self, digest: bytes, grammar: str, tenant: str) -> str:
        """Returns what `_why_not` does. That ends when nobody waits for it any more."""
        key = digest, tenant
        if (running := self._running.get(key)) is None:
            running = self._running[key] = _Running(asyncio.create_task(self._why_not(grammar, tenant)))
        running.num_waiting += 1
        try:
            return await asyncio.shield(running.reason)
        finally:
            running.num_waiting -= 1
            if not running.num_waiting or running.reason.done():
                running.reason.cancel()
                if self._running.get(key) is running:
                    del self._running[key]

    async def _why_not(self, grammar: str, tenant: str) -> str:
        """Returns why the grammar cannot be followed at a cost that can be borne; empty: it can. Raises ApiError."""
        try:
            answer = await self._processes.do(JobKind.GRAMMAR, {"grammar": grammar}, tenant)
        except JobFailed as error:
            return _TOO_COSTLY[error.end is JobEnd.TIME]
        except NoJobs as error:
            raise unavailable("The form of the answer cannot be looked at now. Try again later.", 1) from error
        return answer["error"][:MAX_REASON]
