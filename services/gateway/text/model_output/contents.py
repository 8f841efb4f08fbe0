"""The contents of fields: text, JSON, tags, lines or calls in Python, read when a field is whole."""

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import regex

_PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
_MAX_MATCHING_S = 0.1  # in which a model's own pattern has found the tags of a field
_LITERALS = {"true": True, "false": False, "null": None}  # of JSON, which models write in Python's place too

Arguments = Mapping[str, Any]


class ContentError(Exception):
    """The text of a field has not the form that its template says."""


@contextmanager
def reading() -> Iterator[None]:
    """Translates whatever Python raises for a text that a model wrote. Raises ContentError."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, SyntaxError, RecursionError, MemoryError, TimeoutError) as error:
        raise ContentError(str(error)) from error


def read_content(text: str, name: str, arguments: Arguments) -> Any:
    """Returns the value of a field's text. Raises ContentError."""
    with reading():
        return CONTENTS[name](text, arguments)


def as_json(value: Any) -> str:
    """Returns a value as JSON. Raises ContentError for NaN, infinity, half a surrogate pair, or no value of JSON."""
    with reading():
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
        return written


def transformed(shape: Any, names: Mapping[str, Any]) -> Any:
    """Returns a transform's value, with `{name}` and `{name.key}` replaced by what they name. Raises ContentError."""
    if isinstance(shape, dict):
        return {key: transformed(each, names) for key, each in shape.items()}
    if isinstance(shape, list):
        return [transformed(each, names) for each in shape]
    found = _PLACEHOLDER.fullmatch(shape) if isinstance(shape, str) else None
    if found is None:
        return shape
    value: Any = names
    for key in found[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ContentError(f"there is no '{found[1]}'")
        value = value[key]
    return value


def placeholder(shape: object) -> tuple[str, ...]:
    """Returns the names in a placeholder; empty: it is none."""
    found = _PLACEHOLDER.fullmatch(shape) if isinstance(shape, str) else None
    return () if found is None else tuple(found[1].split("."))


def _text(text: str, arguments: Arguments) -> str:
    return text.strip() if arguments.get("strip", True) else text


def _bool(text: str, arguments: Arguments) -> bool:
    return _text(text, arguments).lower() in ("true", "1")


def _json(text: str, arguments: Arguments) -> Any:
    plain = text
    strings: list[str] = []
    for opening, closing in arguments.get("string_delims", ()):
        pattern = regex.escape(opening) + "(.*?)" + regex.escape(closing)
        plain = regex.sub(pattern, lambda found: _set_aside(found[1], strings), plain, flags=regex.DOTALL)
    if arguments.get("unquoted_keys"):
        plain = regex.sub(r"(?<=[{,])(\w+):", r'"\1":', plain)
    for number, string in enumerate(strings):
        plain = plain.replace(f"\x01{number}\x02", json.dumps(string))
    try:
        return json.loads(plain)
    except ValueError:
        if arguments.get("allow_non_json"):
            return _text(text, arguments)
        raise


def _set_aside(string: str, strings: list[str]) -> str:
    strings.append(string)
    return f"\x01{len(strings) - 1}\x02"


def _tags(text: str, arguments: Arguments) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if (end := arguments.get("tag_end")) is not None:
        text = text[: text.rfind(end) + len(end)] if end in text else ""
    pattern = arguments.get("tag_pattern", "")
    for found in regex.finditer(pattern, text, flags=regex.DOTALL, timeout=_MAX_MATCHING_S):
        named = found.groupdict()
        if named.get("key") is None:
            raise ContentError("'tag_pattern' has no group 'key'")
        value = _value(named.get("value") or "", arguments)
        if arguments.get("merge_duplicates") and named["key"] in values:
            before = values[named["key"]]
            value = [*before, value] if isinstance(before, list) else [before, value]
        values[named["key"]] = value
    return values


def _lines(text: str, arguments: Arguments) -> dict[str, Any]:
    separator, values = arguments.get("kv_sep", ":"), {}
    for line in text.split(arguments.get("line_sep", "\n")):
        key, found, value = _text(line, arguments).partition(separator)
        if found:
            values[_text(key, arguments)] = _value(_text(value, arguments), arguments)
    return values


def _value(text: str, arguments: Arguments) -> Any:
    inner = arguments.get("value_parser")
    return text if inner is None else read_content(text, inner.get("name", "text"), inner.get("args", {}))


def python_call(text: str) -> tuple[str, dict[str, Any]]:
    """Returns name and arguments of one call in Python: `f(a=1, b="x")`. Raises ContentError."""
    with reading():
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            raise ContentError("it is no call with named arguments")
        return ast.unparse(call.func), {str(each.arg): _literal(each.value) for each in call.keywords}


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _LITERALS:
        return _LITERALS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {str(_literal(key)): _literal(each) for key, each in zip(node.keys, node.values, strict=True) if key}
    value = ast.literal_eval(node)
    if value is None or isinstance(value, str | int | float):
        return value
    raise ContentError("an argument is no literal that JSON has")


# Those of the standard, then ours, which are read as they come: JSON objects one after the other, one call in JSON or a
# list of them, and calls in Python.
# `tag_end` of xml-inline is ours too: the text with which every tag ends. No tag is looked for after the last of them.
CONTENTS: dict[str, Callable[[str, Arguments], Any]] = {
    "text": _text,
    "int": lambda text, arguments: int(_text(text, arguments)),
    "float": lambda text, arguments: float(_text(text, arguments)),
    "bool": _bool,
    "json": _json,
    "xml-inline": _tags,
    "kv-lines": _lines,
    "json-sequence": _json,
    "json-calls": _json,
    "python-calls": _text,
}
