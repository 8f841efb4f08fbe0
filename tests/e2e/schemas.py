"""JSON schemas drawn by hypothesis from the keywords that the grammar engine knows, nested and of every kind.

JSON Schema's own test suite would not do: of its 368 schemas of draft 2020-12 llguidance 1.9 refuses 205, most for
keywords that are seldom asked of a model (`unevaluatedProperties`, `$dynamicRef`, remote references). Numbers, strings
and arrays have bounds, as a model that says nothing in particular does not end a text by itself.
"""

import json
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

Schema = dict[str, Any]

_NAMES = ("name", "größe", "a b", 'x"y', "list", "id", "0", "$ref", "日本", "properties")
_VALUES: tuple[Any, ...] = ("red", "grün", 'a"b', "", 3, -1.5, 0, None, True, ["x", 1], {"k": 1}, [], {})
_PATTERNS = ("^[A-Z]{2}-[0-9]{1,4}$", "^(a|bc)*d{1,3}$", "^[^x]{2,5}$", r"^\d{4}-\w{2}$", "^é?[à-ü]{1,3}$")
_FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")


def draw(number: int) -> list[Schema]:
    """Returns so many different schemas, the same ones each time."""
    found: dict[str, Schema] = {}

    @seed(21)
    @settings(
        max_examples=4 * number,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(_roots())
    def collect(schema: Schema) -> None:
        if len(found) < number:
            found.setdefault(json.dumps(schema), schema)

    collect()
    assert len(found) == number, f"only {len(found)} schemas differ"
    return list(found.values())


def _roots() -> st.SearchStrategy[Schema]:
    return st.one_of(_objects(_schemas()), _arrays(_schemas()), _schemas(), _with_definitions())


def _schemas() -> st.SearchStrategy[Schema]:
    return st.recursive(_leaves(), _nested, max_leaves=6)


def _leaves() -> st.SearchStrategy[Schema]:
    simple = st.sampled_from(["boolean", "null", ["boolean", "null"]]).map(lambda kind: {"type": kind})
    constant = st.sampled_from(_VALUES).map(lambda value: {"const": value})
    choice = st.lists(st.sampled_from(_VALUES), min_size=1, max_size=4, unique_by=repr).map(lambda each: {"enum": each})
    return st.one_of(_strings(), _integers(), _numbers(), simple, constant, choice)


def _nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.one_of(_objects(inner), _objects(inner), _arrays(inner), _tuples(inner), _either(inner), _maps(inner))


@st.composite
def _strings(draw: st.DrawFn) -> Schema:
    match draw(st.sampled_from(["length", "pattern", "format"])):
        case "pattern":
            return {"type": "string", "pattern": draw(st.sampled_from(_PATTERNS))}
        case "format":
            return {"type": "string", "format": draw(st.sampled_from(_FORMATS))}
    least = draw(st.integers(0, 5))
    return {"type": "string", "minLength": least, "maxLength": least + draw(st.integers(0, 12))}


@st.composite
def _integers(draw: st.DrawFn) -> Schema:
    least = draw(st.integers(-1000, 1000))
    most = least + draw(st.integers(7, 5000))
    bounds = draw(st.sampled_from([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")]))
    schema: Schema = {"type": "integer", bounds[0]: least, bounds[1]: most}
    return {**schema, "multipleOf": draw(st.sampled_from([1, 2, 3]))} if draw(st.booleans()) else schema


@st.composite
def _numbers(draw: st.DrawFn) -> Schema:
    least = draw(st.integers(-50, 50)) / 4
    return {"type": "number", "minimum": least, "maximum": least + draw(st.integers(1, 400)) / 8}


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    names = draw(st.lists(st.sampled_from(_NAMES), max_size=5, unique=True))
    schema: Schema = {"type": "object", "properties": {name: draw(inner) for name in names}}
    if required := [name for name in names if draw(st.booleans())]:
        schema["required"] = required
    return {**schema, "additionalProperties": False}


@st.composite
def _maps(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    """Names that no schema lists. Of at most one of them, as nothing keeps a model from one name twice."""
    named = draw(st.sampled_from([{"patternProperties": {"^[a-z]{1,3}$": draw(inner)}, "additionalProperties": False}]))
    return {"type": "object", **named, "minProperties": draw(st.integers(0, 1)), "maxProperties": 1}


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    least = draw(st.integers(0, 2))
    return {"type": "array", "items": draw(inner), "minItems": least, "maxItems": least + draw(st.integers(0, 3))}


@st.composite
def _tuples(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    first = draw(st.lists(inner, min_size=1, max_size=3))
    return {"type": "array", "prefixItems": first, "items": False, "minItems": draw(st.integers(0, len(first)))}


@st.composite
def _either(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    if draw(st.booleans()):
        return {"anyOf": draw(st.lists(inner, min_size=1, max_size=3))}
    if draw(st.booleans()):
        kinds = [{"type": "object", "properties": {"kind": {"const": kind}, "of": draw(inner)}} for kind in ("a", "b")]
        return {"oneOf": [{**kind, "required": ["kind"], "additionalProperties": False} for kind in kinds]}
    return {"allOf": [draw(_integers()), {"type": "integer", "minimum": -5000}]}


@st.composite
def _with_definitions(draw: st.DrawFn) -> Schema:
    """A tree, or a list of which each item may have another one; and a schema that is used twice."""
    leaf = draw(_leaves())
    node = {
        "type": "object",
        "properties": {
            "value": {"$ref": "#/$defs/leaf"},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"leaf": leaf, "node": node}, "$ref": f"#/$defs/{draw(st.sampled_from(['leaf', 'node']))}"}
