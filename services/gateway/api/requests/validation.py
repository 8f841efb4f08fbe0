"""Makes a typed request of a request's bytes, or the one error that names the wrong field."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from services.gateway.api.errors import ApiError, invalid, unsupported
from services.gateway.api.requests.hints import HINTS, reason_of
from services.gateway.api.requests.large_json import JsonError, read_large, takes_long
from services.gateway.api.requests.refusals import REASONS
from services.gateway.api.requests.strict import MAX_FIELDS, Strict

Checked = TypeVar("Checked", bound=Strict)

# Fields that clients know and Baton does not act on, each with the values that ask for nothing. null always does. Any
# other value is refused, but for hints.
Neutral = Mapping[str, tuple[object, ...]]

# Fields between gateways and workers of vLLM, which clients have no business with: only null passes.
INTERNAL_FIELDS = ("ec_transfer_params", "kv_transfer_params", "vllm_xargs")

# OpenAI's codes for pydantic's error types. {int, decimal} fields have codes of their own for their bounds.
_CODES = {
    "missing": "missing_required_parameter",
    "literal_error": "invalid_value",
    "finite_number": "invalid_value",
    "string_too_short": "string_below_min_length",
    "string_too_long": "string_above_max_length",
    "unsupported": "unsupported_value",
}
_BOUNDS = {
    "greater_than": ("below_min_value", "above {gt}"),
    "greater_than_equal": ("below_min_value", "at least {ge}"),
    "less_than": ("above_max_value", "below {lt}"),
    "less_than_equal": ("above_max_value", "at most {le}"),
}
_MAX_PARAM_CHARS = 200  # of a name that the client chose

_TYPES = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer of at most 64 bits",
    "list_type": "an array",
    "model_type": "an object",
    "string_type": "a string",
}


def parse_request(body: bytes, kind: type[Checked], neutral: Neutral) -> Checked:
    """Returns the request in a body. Raises ApiError for anything that is not a valid request of this kind.

    A body that `takes_long` should be parsed beside the event loop.
    """
    try:
        return validate_request(read_value(body), kind, neutral)
    except orjson.JSONDecodeError as error:
        raise _malformed(body, kind, neutral) from error


def read_value(body: bytes) -> Any:
    """Returns the JSON value of a body. Raises orjson.JSONDecodeError, and ApiError for one of a large body.

    A body that `takes_long` should be read beside the event loop.
    """
    try:
        return read_large(body) if takes_long(body) else orjson.loads(body)
    except JsonError as error:
        raise not_json() from error


def _malformed(body: bytes, kind: type[Checked], neutral: Neutral) -> ApiError:
    """Names the field that holds NaN or an infinity, which JSON lacks and Python clients write; else the body."""
    try:
        validate_request(json.loads(body.decode("utf-8")), kind, neutral)
    except ApiError as error:
        if isinstance(error.__cause__, ValidationError):
            for details in error.__cause__.errors(include_url=False):
                if details["type"] == "finite_number":
                    return _from_details(details)
    except (ValueError, RecursionError):
        pass  # not even Python's JSON: the error below is all there is to say
    return not_json()


def not_json() -> ApiError:
    """The error for a body that is no JSON."""
    return invalid("The body is not valid JSON in UTF-8, or it is nested too deeply.", None)


def validate_request(value: object, kind: type[Checked], neutral: Neutral) -> Checked:
    """Returns the request in a JSON value. Raises ApiError."""
    asked = _without_neutral(check_object(value), neutral)
    given = {name: field for name, field in asked.items() if field is not None or name not in kind.model_fields}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _from_details(error.errors(include_url=False, include_input=True)[0]) from error


def ignored_fields(names: Iterable[str], strict: bool) -> tuple[str, ...]:
    """Returns the names of the fields that nothing acts on. strict: raises ApiError where there are any."""
    ignored = tuple(names)
    if strict and ignored:
        raise not_acted_on(ignored[0])
    return ignored


def not_acted_on(path: str) -> ApiError:
    """The error for a field that nobody knows, or for a hint that nothing acts on."""
    if (reason := reason_of(path)) is None:
        return unknown_field(path)
    return unsupported(path, f"'{path}' is not acted on: {reason}. A server without --strict-fields ignores it.")


def check_object(value: object) -> Mapping[str, Any]:
    """Returns a JSON object of few fields. Raises ApiError for any other value."""
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.", None)
    if len(value) > MAX_FIELDS:
        raise invalid(f"The body has more than {MAX_FIELDS} fields.", None)
    return value


def _without_neutral(body: Mapping[str, Any], table: Neutral) -> dict[str, Any]:
    """Removes the fields that ask for nothing; hints that ask for something stay.

    Raises ApiError for another field that asks for what is not supported.
    """
    rest: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            if name not in table and name not in INTERNAL_FIELDS:
                rest[name] = value
        elif name in INTERNAL_FIELDS:
            raise unknown_field(name)
        elif name in table:
            if any(type(value) is type(neutral) and value == neutral for neutral in table[name]):
                continue
            if name not in HINTS:
                raise _not_neutral(name, table[name])
            rest[name] = value
        else:
            rest[name] = value
    return rest


def unknown_field(path: str) -> ApiError:
    """The error for a field that nobody knows."""
    param = path[:_MAX_PARAM_CHARS]
    return invalid(f"Unrecognized request argument supplied: {param}", param, "unknown_parameter")


def _not_neutral(name: str, neutral: tuple[object, ...]) -> ApiError:
    if (reason := REASONS.get(name)) is not None:
        return unsupported(name, reason)
    if not neutral:
        return unsupported(name)
    allowed = " or ".join(repr(value) if not isinstance(value, bool) else str(value).lower() for value in neutral)
    return unsupported(name, f"'{name}' is not supported by this server; leave it out or set it to {allowed}.")


def _from_details(details: ErrorDetails) -> ApiError:
    param = _path(details["loc"])
    kind, context = details["type"], details.get("ctx", {})
    if kind == "missing":
        return invalid(f"Missing required parameter: '{param}'.", param, _CODES[kind])
    if kind == "extra_forbidden":
        return unknown_field(param)
    if kind in _BOUNDS:
        suffix, allowed = _BOUNDS[kind]
        number = "decimal" if isinstance(details["input"], float) or param.endswith("penalty") else "integer"
        message = f"Invalid '{param}': it must be {allowed.format(**_plain(context))}."
        return invalid(message, param, f"{number}_{suffix}")
    if kind in _TYPES:
        return invalid(f"Invalid type for '{param}': expected {_TYPES[kind]}.", param, "invalid_type")
    if kind == "literal_error":
        return _unknown_literal(param, details["input"], str(context.get("expected")))
    if kind in ("too_short", "too_long"):
        return _wrong_length(param, kind, context)
    if kind == "unsupported":
        return unsupported(param, f"Invalid '{param}': {details['msg']}")
    if kind == "finite_number":
        return invalid(f"Invalid '{param}': it must be a finite number.", param, _CODES[kind])
    return invalid(f"Invalid '{param}': {details['msg']}", param, _CODES.get(kind, "invalid_value"))


def _unknown_literal(param: str, found: object, expected: str) -> ApiError:
    shown = f" '{found[:64]}'" if isinstance(found, str) else ""
    message = f"Invalid value{shown} for '{param}': supported are {expected.replace('False', 'false')}."
    return invalid(message, param, "invalid_value")


def _wrong_length(param: str, kind: str, context: Mapping[str, Any]) -> ApiError:
    if kind == "too_short":
        message = f"Invalid '{param}': it must have at least {context['min_length']} entry."
        return invalid(message, param, "empty_array")
    message = f"Invalid '{param}': it must have at most {context['max_length']} entries."
    return invalid(message, param, "array_above_max_length")


def _plain(context: Mapping[str, Any]) -> dict[str, str]:
    # 2.0 reads as 2, and 2**63 keeps all its digits.
    return {name: str(int(bound)) if bound == int(bound) else str(bound) for name, bound in context.items()}


def _path(location: tuple[int | str, ...]) -> str:
    """Returns a field's path as clients write it. A step in parentheses is a union's tag, and no field."""
    path = ""
    for step in location:
        if isinstance(step, str) and step.startswith("("):
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path[:_MAX_PARAM_CHARS]
