"""Texts of a JSON schema as patterns: for arguments that a model writes without quotes."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.grammars.forms import lark_string
from services.gateway.api.grammars.grammar_rules import in_pattern
from services.gateway.text.model_output.argument_types import values_of

_DAY = "(0[1-9]|1[0-9]|2[0-8])"
_DATE = rf"[1-9][0-9]{{3}}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_NAME = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"

# Texts that surely have the format; not all that have it.
_FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": rf"[a-zA-Z0-9_+-]{{1,32}}(\.[a-zA-Z0-9_+-]{{1,16}})?@{_NAME}(\.{_NAME}){{1,4}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uri": rf"[a-z][a-z0-9+.-]{{0,15}}:\/\/{_NAME}(\.{_NAME}){{0,8}}(:[1-9][0-9]{{0,3}})?"
    r"(\/[a-zA-Z0-9._~-]*)*(\?[a-zA-Z0-9._~=&-]*)?(#[a-zA-Z0-9._~-]*)?",
}
_NOT_HELD = ("not", "if", "$ref")  # keywords that can say more of a text


def text_terminals(schema: Mapping[str, Any], closing: str, param: str) -> list[str]:
    """Returns terminals in llguidance's notation: a text with this schema, and then `closing`, matches all of them.

    Empty where any text has the schema. A text with a length or a pattern has no `<`: llguidance cannot both count its
    characters and look for a longer mark. Raises ApiError for what no pattern says.
    """
    end, found = in_pattern(closing), []
    if unknown := [key for key in _NOT_HELD if key in schema]:
        raise not_held(param, f"'{unknown[0]}' of a string")
    if (values := values_of(schema)) is not None:
        found.append(f"({_listed(values, param)} {lark_string(closing)})")
    least, most = (_length(schema, key, param) for key in ("minLength", "maxLength"))
    if least or most is not None:
        found.append(f"/[^<]{{{least or 0},{'' if most is None else most}}}{end}/")
    if "pattern" in schema:
        found += [f"/{_searched(schema['pattern'], param)}{end}/", f"/[^<]*{end}/"]
    if "format" in schema:
        found.append(f"/({_of_format(schema['format'], param)}){end}/")
    return found


def not_held(param: str, what: str) -> ApiError:
    """400: a schema of which no grammar can be made where arguments are written without quotes."""
    words = f"this model writes arguments between tags, for which no grammar can be made of {what}."
    return invalid(f"Invalid '{param}': {words}", param, "unsupported_value")


def _listed(values: Sequence[Any], param: str) -> str:
    texts = [value for value in values if isinstance(value, str)]
    if not texts or any("</" in text for text in texts):
        raise not_held(param, "a string with no values, or with '</' in one")
    return f"({' | '.join(map(lark_string, texts))})"


def _length(schema: Mapping[str, Any], key: str, param: str) -> int | None:
    value = schema.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise not_held(param, f"'{key}' that is no number of characters")
    return value


def _searched(pattern: object, param: str) -> str:
    """Returns a pattern that matches the whole of a text in which `pattern` is found."""
    if not isinstance(pattern, str):
        raise not_held(param, "a 'pattern' that is no text")
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inner = pattern[int(begins) : len(pattern) - int(ends)]
    if (begins or ends) and _has_alternatives(inner):
        raise not_held(param, "a 'pattern' with anchors in one of several alternatives")
    try:
        inner = regex_to_lark(inner, "dw")
    except ValueError as error:
        raise not_held(param, f"the 'pattern': {error}") from error
    return f"{'' if begins else '[^<]*'}({inner}){'' if ends else '[^<]*'}"


def _has_alternatives(pattern: str) -> bool:
    """True where alternatives are those of the whole pattern, and not of a group."""
    depth = 0
    for found in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[(|)]", pattern, re.DOTALL):
        depth += {"(": 1, ")": -1}.get(found.group(), 0)
        if found.group() == "|" and not depth:
            return True
    return False


def _of_format(name: object, param: str) -> str:
    if not isinstance(name, str) or name not in _FORMATS:
        raise not_held(param, f"the 'format' {name!r}"[:100])
    return _FORMATS[name]
