"""Grammars of single forms (a JSON schema, a regular expression, choices, a grammar), as text for llguidance."""

import re
from typing import Any

import orjson
from llguidance import LLMatcher

from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.grammars.gbnf import RULE_OF_GBNF, GbnfError, gbnf_to_lark
from services.gateway.api.grammars.json_schema import close_objects
from services.gateway.api.requests.form_texts import MAX_CHARS, JsonStyle

MAX_REASON = 500  # characters of the reason why a form is refused
_MAX_RULES = 512  # in GBNF

_WITHOUT_TEXTS = re.compile("NoExtension")
_TOO_COMPLEX = re.compile("TooComplex|fuel exhausted|limit.* exceeded|too many expressions")
# Paths of Rust and Python, names of their types, files and packages.
_INSIDE = re.compile(
    r"::|^<[\w-]+>$|\bf64\b|\bSome\(|\b(?:[A-Z][a-z0-9]+){2,}\b|\.(?:rs|py)\b|panicked"
    r"|(?i:guidance|derivre|toktrie|serde|jsonschema)"
)
# Packages and their options, also where the client's own text has them.
_PACKAGE = re.compile("(?i:llguidance|derivre|toktrie)|coerce_one_of")
_PANIC = re.compile(r"^\W*panic", re.MULTILINE | re.IGNORECASE)  # all that follows is about the library's inside


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
    """Returns the grammar of a text in Lark's notation, or in GBNF, llama.cpp's. Raises ApiError."""
    if num_rules := len(RULE_OF_GBNF.findall(grammar)):
        if num_rules > _MAX_RULES:
            raise wrong(param, f"a grammar in GBNF must have at most {_MAX_RULES} rules.")
        try:
            grammar = gbnf_to_lark(grammar)
        except GbnfError as error:
            raise wrong(param, str(error)) from error
        except RecursionError as error:
            raise wrong(param, "it is nested too deeply.") from error
    return orjson.dumps({"grammars": [{"lark_grammar": grammar}]}).decode()  # whatever the text is


def lark_string(text: str) -> str:
    """Returns a text as Lark's notation has it."""
    return orjson.dumps(text).decode()


def wrong(param: str, reason: str) -> ApiError:
    """400: a form that makes no grammar, or not one that can be followed. reason: the library's, maybe."""
    return invalid(f"Invalid '{param}': {_in_plain_words(reason.strip())[:MAX_REASON]}", param, "invalid_grammar")


def _in_plain_words(reason: str) -> str:
    """Returns a reason without the names that the library has for its own parts; what it quotes is the client's."""
    if _WITHOUT_TEXTS.search(_unquoted(reason)):
        return "it has no text, or none that goes on as it begins."
    if _TOO_COMPLEX.search(_unquoted(reason)):
        return "it is too complex to be followed."
    parts = re.split(r"(; |\n|(?<=\.) |, (?=expected ))", _PANIC.split(reason)[0])  # with what is between them
    plain = "".join(
        part + after
        for part, after in zip(parts[::2], [*parts[1::2], ""], strict=True)
        if not _INSIDE.search(_unquoted(part)) and not _PACKAGE.search(part)
    )
    return plain.strip(";, \n") or "it cannot be followed."


def _unquoted(text: str) -> str:
    return re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"", "", text)


def too_large(param: str, words: str = f"it must have at most {MAX_CHARS} characters.") -> ApiError:
    """400: a form that is too long, or becomes that."""
    return invalid(f"Invalid '{param}': {words}", param, "string_above_max_length")
