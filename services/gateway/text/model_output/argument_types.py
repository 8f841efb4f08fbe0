"""The types of arguments that a model writes as plain texts: those that the tool's schema names."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.text.model_output.contents import ContentError, as_json, read_content

Schema = Mapping[str, Any]

DEFINITIONS = ("$defs", "definitions")  # the parts of a schema that references name
_COMBINED = ("anyOf", "oneOf", "allOf")
_MAX_REFERENCES = 16  # one after the other


def typed(arguments: Any, parameters: Schema) -> Any:
    """Returns arguments whose texts have become the values that the tool's schema names, where they can."""
    properties = parameters.get("properties")
    if not isinstance(arguments, dict) or not isinstance(properties, Mapping):
        return arguments
    return {key: _as_type(value, types_of(properties.get(key), parameters)) for key, value in arguments.items()}


def types_of(schema: object, parameters: Schema) -> list[str]:
    """Returns the types that values of a schema may have, as far as it names them.

    parameters: the whole schema, which references are into.
    """
    found: list[str] = []
    for part in parts_of(schema, parameters):
        named = part.get("type")
        if isinstance(named, str | list):
            found += [named] if isinstance(named, str) else [each for each in named if isinstance(each, str)]
        else:
            found += map(type_of, values_of(part) or ())
    return list(dict.fromkeys(found))


def parts_of(schema: object, parameters: Schema) -> list[Schema]:
    """Returns a schema and those that it combines, references followed, each one once."""
    found: dict[int, Schema] = {}
    waiting = deque([schema])
    while waiting:
        part = _resolved(waiting.popleft(), parameters)
        if isinstance(part, Mapping) and id(part) not in found:
            found[id(part)] = part
            waiting.extend(each for key in _COMBINED for each in _listed(part.get(key)))
    return list(found.values())


def values_of(schema: Schema) -> Sequence[Any] | None:
    """Returns the values that a schema lists; None: it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return _listed(schema["enum"]) if "enum" in schema else None


def type_of(value: Any) -> str:
    """Returns the name that JSON Schema has for a value's type."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array"


def _resolved(schema: object, parameters: Schema) -> object:
    """Returns the schema that a reference into the definitions names, or the schema itself."""
    for _ in range(_MAX_REFERENCES):
        target = schema.get("$ref") if isinstance(schema, Mapping) else None
        path = target.split("/") if isinstance(target, str) else []
        if len(path) != 3 or path[0] != "#" or path[1] not in DEFINITIONS:
            return schema
        named = parameters.get(path[1])
        schema = named.get(path[2].replace("~1", "/").replace("~0", "~")) if isinstance(named, Mapping) else None
    return None


def _as_type(value: Any, types: Sequence[str]) -> Any:
    if not isinstance(value, str):
        return value
    for kind in types:
        try:
            read = read_content(value.strip() if kind != "boolean" else value.strip().lower(), "json", {})
            as_json(read)
        except ContentError:
            continue
        found = type_of(read)
        if found != "string" and (found == kind or (found == "integer" and kind == "number")):
            return int(read) if kind == "integer" else read
    return value


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
