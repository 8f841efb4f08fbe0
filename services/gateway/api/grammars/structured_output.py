"""The form that a request asks its answer to have, as a grammar in one of llguidance's notations."""

from collections.abc import Mapping

from services.gateway.api.errors import invalid
from services.gateway.api.grammars.forms import of_choices, of_grammar, of_regex, of_schema, too_large
from services.gateway.api.grammars.tag_grammar import of_tag
from services.gateway.api.requests.form_texts import JsonStyle
from services.gateway.api.requests.structured import ResponseFormat, StructuredOutputs
from services.protocol.sampling import MAX_GRAMMAR

_NO_TOKENS: Mapping[str, int] = {}


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
