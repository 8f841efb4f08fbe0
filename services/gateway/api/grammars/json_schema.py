"""Changes to JSON schemas ahead of the grammar engine, which reads draft 2020-12."""

from typing import Any

# Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def close_objects(schema: Any) -> Any:
    """Returns the schema with `additionalProperties: false` in each object schema that names properties and does not
    say which others it has.
    """
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for keyword in _ONE:
        if keyword in closed:
            closed[keyword] = close_objects(closed[keyword])
    for keyword in _LISTS:
        if isinstance(closed.get(keyword), list):
            closed[keyword] = [close_objects(each) for each in closed[keyword]]
    for keyword in _MAPS:
        if isinstance(closed.get(keyword), dict):
            closed[keyword] = {name: close_objects(each) for name, each in closed[keyword].items()}
    if "additionalProperties" not in closed and ("properties" in closed or "patternProperties" in closed):
        closed["additionalProperties"] = False
    return closed
