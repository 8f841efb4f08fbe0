"""Structured output: the form that a request asks its answer to have, as a grammar for the workers.

What a client sends is turned into one of llguidance's notations, and compiled once here: a grammar that is wrong or too
costly is refused with the library's words, before any work is done for it.
"""

import asyncio
import time
from collections import OrderedDict
from typing import Annotated, Any, Literal, Self

import llguidance
import numpy as np
import orjson
from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.strict import Strict
from services.gateway.text.tokenizer import Tokenizer

MAX_CHARS = 1 << 16  # of a schema as JSON, a regular expression, a grammar, or all choices together
MAX_CHOICES = 1024
_MAX_RULES = 512  # in GBNF, whose translation takes the square of their number: 3,500 took 7.6 s
_MAX_CHECKED = 256  # grammars that are known to be right or wrong
_LONGEST_S = 1.0  # to compile a grammar, and to follow it for one token
_NO_BITS = np.zeros(0, dtype=np.uint8)

# Compact JSON, with a space after commas and colons. Small models that may write any white space often write nothing
# else any more.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

Text = Annotated[str, Field(min_length=1, max_length=MAX_CHARS)]


class JsonSchemaFormat(Strict):
    """The `json_schema` of a `response_format`. Answers match the schema also where `strict` is not true."""

    model_config = ConfigDict(populate_by_name=True)

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            words = "'json_schema' goes with the type of that name, and with no other."
            raise PydanticCustomError("json_schema_type", words)
        return self


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: one of these."""

    model_config = ConfigDict(populate_by_name=True)

    json_schema: Annotated[dict[str, Any] | Text | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Text | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        named = (self.json_schema, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(each is not None for each in named) != 1:
            kinds = "json, json_object, regex, choice, grammar"
            raise PydanticCustomError("structured_outputs", "It must have exactly one of {kinds}.", {"kinds": kinds})
        return self


def grammar_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> tuple[str, str]:
    """Returns the grammar of the answer, and the field that it comes from; both empty where any answer will do.

    Raises ApiError. A grammar of some size takes long to translate: this is not for the event loop.
    """
    if response_format is not None and response_format.type != "text":
        if structured is not None:
            raise invalid("'response_format' and 'structured_outputs' exclude each other.", "structured_outputs")
        wanted = response_format.json_schema
        schema = {"type": "object"} if wanted is None or wanted.json_schema is None else wanted.json_schema
        return _of_schema(schema, "response_format"), "response_format"
    if structured is None:
        return "", ""
    return _of_structured(structured), "structured_outputs"


def _of_structured(wanted: StructuredOutputs) -> str:
    matcher = llguidance.LLMatcher
    if wanted.json_schema is not None:
        return _of_schema(wanted.json_schema, "structured_outputs.json")
    if wanted.regex is not None:
        return matcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        if sum(map(len, wanted.choice)) > MAX_CHARS:
            raise _too_large("structured_outputs.choice")
        return matcher.grammar_from_lark("start: " + " | ".join(map(_lark_string, wanted.choice)))
    if wanted.grammar is not None:
        return matcher.grammar_from_lark(_as_lark(wanted.grammar))
    return _of_schema({"type": "object"}, "structured_outputs")


def _of_schema(schema: dict[str, Any] | str, param: str) -> str:
    text = schema if isinstance(schema, str) else orjson.dumps(schema).decode()
    if len(text) > MAX_CHARS:
        raise _too_large(param)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_JSON_STYLE)  # type: ignore[arg-type]
    except ValueError as error:
        raise _wrong(param, str(error)) from error


def _lark_string(text: str) -> str:
    return orjson.dumps(text).decode()


def _as_lark(grammar: str) -> str:
    """Returns a grammar in Lark's notation. One in GBNF, llama.cpp's, is known by its `::=`."""
    if not (num_rules := grammar.count("::=")):
        return grammar
    if num_rules > _MAX_RULES:
        raise _wrong("structured_outputs.grammar", f"a grammar in GBNF must have at most {_MAX_RULES} rules.")
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the parser raises nothing more precise
        raise _wrong("structured_outputs.grammar", str(error)) from error


class GrammarChecks:
    """Compiles grammars before they are sent to workers, one at a time: one that is too costly costs no more than that.

    A grammar of large counts, as `(a{1000}){1000}`, shows what it costs with its second mask.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiler: llguidance.LLTokenizer | None = None  # takes a while to make, and is made when it is needed
        self._known: OrderedDict[str, str] = OrderedDict()  # why not, or empty; least recently used first
        self._compiling = asyncio.Lock()

    async def check(self, grammar: str, param: str) -> None:
        """Raises ApiError for a grammar that workers could not follow. `param`: the field that it comes from."""
        if grammar not in self._known:
            async with self._compiling:
                if grammar not in self._known:
                    self._known[grammar] = await asyncio.to_thread(self._why_not, grammar)
            if len(self._known) > _MAX_CHECKED:
                self._known.popitem(last=False)
        self._known.move_to_end(grammar)
        if reason := self._known[grammar]:
            raise _wrong(param, reason)

    def _why_not(self, grammar: str) -> str:
        """Follows the grammar for one token. Empty: it can be followed at a cost that can be borne."""
        began = time.monotonic()
        if self._compiler is None:
            self._compiler = llguidance.LLTokenizer(self._tokenizer.backend.to_str())
            began = time.monotonic()
        limits = llguidance.LLParserLimits(verbose_errors=False)  # the others are for the parser's inside
        matcher = llguidance.LLMatcher(self._compiler, grammar, log_level=0, limits=limits)
        allowed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8) if not matcher.is_error() else _NO_BITS
        first = np.flatnonzero(np.unpackbits(allowed, bitorder="little"))[:1].tolist()
        if first and matcher.consume_tokens(first) and not matcher.is_stopped():
            matcher.compute_bitmask()
        if not matcher.is_error() and time.monotonic() - began > _LONGEST_S:
            return f"it takes longer than {_LONGEST_S:g} s to follow it for one token"
        return matcher.get_error()


def _wrong(param: str, reason: str) -> ApiError:
    return invalid(f"Invalid '{param}': {reason.strip()[:500]}", param, "invalid_grammar")


def _too_large(param: str) -> ApiError:
    return invalid(f"Invalid '{param}': it must have at most {MAX_CHARS} characters.", param, "string_above_max_length")


def schema_grammar(schema: dict[str, Any], param: str) -> str:
    """Returns the grammar of JSON that matches a schema. `param`: the field that it comes from. Raises ApiError."""
    return _of_schema(schema, param)
