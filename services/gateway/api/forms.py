"""Grammars of single forms (a JSON schema, a regular expression, choices, a grammar), as text for llguidance."""

from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import Field

from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.json_schema import close_objects

MAX_CHARS = 1 << 16  # of a schema as JSON, a regular expression, a grammar, all choices together, structural tags
MAX_CHOICES = 1024
MAX_REASON = 500  # characters of the reason why a form is refused
_MAX_RULES = 512  # in GBNF, whose translation takes the square of their number: 3,500 took 7.6 s

Text = Annotated[str, Field(min_length=1, max_length=MAX_CHARS)]


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """The style in which JSON is written.

    Without a pattern it is compact, with a space after commas and colons. Small models that may write any white space
    often write nothing else any more.

    whitespace: a regular expression of what may stand wherever JSON allows white space; None: `spaces` says it.
    spaces: False: no white space at all.
    closed: objects have no properties that their schema does not name, unless it says so itself.
    """

    whitespace: str | None = None
    spaces: bool = True
    closed: bool = False

    def overrides(self) -> dict[str, Any]:
        """Returns llguidance's options."""
        if self.whitespace is not None:
            return {"whitespace_pattern": self.whitespace, "item_separator": ",", "key_separator": ":"}
        space = " " if self.spaces else ""
        return {"whitespace_flexible": False, "item_separator": "," + space, "key_separator": ":" + space}


def of_schema(schema: dict[str, Any] | str, style: JsonStyle, param: str) -> str:
    """Returns the grammar of a JSON schema. Raises ApiError for text that is no JSON, and for one that is too long."""
    text = schema if isinstance(schema, str) else orjson.dumps(schema).decode()
    if len(text) > MAX_CHARS:
        raise too_large(param)
    try:
        if style.closed:
            text = orjson.dumps(close_objects(orjson.loads(text))).decode()
        return LLMatcher.grammar_from_json_schema(text, overrides=style.overrides())  # type: ignore[arg-type]
    except ValueError as error:
        raise wrong(param, str(error)) from error
    except RecursionError as error:
        raise wrong(param, "it is nested too deeply.") from error


def of_regex(pattern: str) -> str:
    """Returns the grammar of a regular expression."""
    return LLMatcher.grammar_from_regex(pattern)


def of_choices(choices: list[str], param: str) -> str:
    """Returns the grammar of one of these texts. Raises ApiError where they are too long."""
    if sum(map(len, choices)) > MAX_CHARS:
        raise too_large(param)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(lark_string, choices)))


def of_grammar(grammar: str, param: str) -> str:
    """Returns the grammar of a text in Lark's notation, or in GBNF, llama.cpp's, which has `::=`. Raises ApiError."""
    if num_rules := grammar.count("::="):
        if num_rules > _MAX_RULES:
            raise wrong(param, f"a grammar in GBNF must have at most {_MAX_RULES} rules.")
        try:
            grammar = gbnf_to_lark(grammar)
        except Exception as error:  # the parser raises nothing more precise
            raise wrong(param, str(error)) from error
    return orjson.dumps({"grammars": [{"lark_grammar": grammar}]}).decode()  # whatever the text is


def lark_string(text: str) -> str:
    """Returns a text as Lark's notation has it."""
    return orjson.dumps(text).decode()


def wrong(param: str, reason: str) -> ApiError:
    """400: a form that makes no grammar, or not one that can be followed."""
    return invalid(f"Invalid '{param}': {reason.strip()[:MAX_REASON]}", param, "invalid_grammar")


def too_large(param: str) -> ApiError:
    """400: a form that is too long."""
    return invalid(f"Invalid '{param}': it must have at most {MAX_CHARS} characters.", param, "string_above_max_length")
