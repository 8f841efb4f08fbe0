"""Arguments between tags, `<parameter=name>`, as rules of a grammar: strings as they are, all else as JSON."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from services.gateway.api.grammars.forms import lark_string, of_schema
from services.gateway.api.grammars.grammar_rules import Rules, in_pattern
from services.gateway.api.grammars.text_pattern import not_held, text_terminals
from services.gateway.api.requests.form_texts import JsonStyle
from services.gateway.text.model_output.argument_types import (
    DEFINITIONS,
    Schema,
    parts_of,
    type_of,
    types_of,
    values_of,
)

_CLOSING = "</parameter>"
_KEY = re.compile(r"[^<>\s]+")
_REFERENCE = re.compile(rb'"\$ref":"(?!#/(?:\$defs|definitions)/[^/"]+")')  # what is no reference into the definitions

# Any text that the reader of calls takes for one argument, without the end of it or of the call.
_ANY = r"/(.|\n)*/ & ~/(.|\n)*<\/parameter>(.|\n)+/ & ~/(.|\n)*<\/function>\s*<\/tool_call>(.|\n)*/"

# Characters with which texts begin that the reader takes for values of these types, where the schema allows them.
# No such text begins with white space either. Null is then as right as the text.
_READ_AS: Mapping[str, str] = {
    "integer": r"0-9\-",
    "number": r"0-9\-",
    "object": "{",
    "array": r"\[",
    "boolean": "tTfF",
}

# Keywords of an object's schema that say nothing of its properties' values beyond those that rules are made of.
_NOT_HELD = (
    *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "enum", "const", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
)


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """The arguments of one tool. number: the tool's; param: the request's field that the schema is in."""

    rules: Rules
    schema: Schema
    number: int
    param: str

    def add(self) -> str:
        """Adds the rules; returns an expression of all arguments, in the order of the schema. Raises ApiError."""
        properties = self._properties()
        if properties is None:
            key = self.rules.add("PARAMETER", r"/[^<>\s]+/")
            value = self._text({}, "ANY_ARGUMENT", ())
            any_one = self.rules.add("any_argument", f'{self.rules.text("<parameter=")} {key} ">\\n" {value}')
            return f"{any_one}*"
        required = self.schema.get("required", ())
        written = []
        for index, (name, schema) in enumerate(properties.items()):
            value = self._value(schema, f"{self.number}_{index}")
            rule = f"{self.rules.text(f'<parameter={name}>')} {lark_string(chr(10))} {value}"
            each = self.rules.add(f"argument_{self.number}_{index}", rule)
            written.append(each if name in required else f"{each}?")
        return " ".join(written)

    def _properties(self) -> Mapping[str, Any] | None:
        """The schemas of the arguments that there may be; None: any."""
        schema = self.schema
        if unknown := [key for key in _NOT_HELD if key in schema]:
            raise not_held(self.param, f"'{unknown[0]}' of all arguments")
        if _REFERENCE.search(orjson.dumps(schema)):
            raise not_held(self.param, "a '$ref' that is not one of '$defs'")
        properties, required = schema.get("properties"), schema.get("required", [])
        if properties is None and not required and schema.get("additionalProperties") in (None, True, {}):
            return None
        if not isinstance(properties or {}, dict) or not isinstance(required, list):
            raise not_held(self.param, "'properties' or 'required' of another type")
        named = {**(properties or {}), **{str(name): {} for name in required if name not in (properties or {})}}
        if wrong := [name for name in named if not _KEY.fullmatch(name)]:
            raise not_held(self.param, f"the property {wrong[0]!r}"[:100])
        return named

    def _value(self, schema: object, name: str) -> str:
        """Adds the rules of a value and what closes it; returns the expression."""
        types = types_of(schema, self.schema)
        if types and "string" not in types:
            return self._json(schema, f"json_{name}")
        parts = parts_of(schema, self.schema)
        ends = [part for part in parts if not ("anyOf" in part or "oneOf" in part)]
        if schema is False or any("allOf" in part or (part not in ends and _has_more(part)) for part in parts):
            raise not_held(self.param, "'allOf', or of 'anyOf' with other keywords beside it, where it allows strings")
        if all(values_of(part) is None for part in parts):
            types = [each for each in types if each != "boolean"]  # either of them is right
        choices = []
        for number, part in enumerate(each for end in ends for each in _by_type(end, self.schema)):
            if part.get("type") in (None, "string"):
                choices.append(self._text(part, f"TEXT_{name}_{number}", types))
            else:
                choices.append(self._json(part, f"json_{name}_{number}"))
        return f"({' | '.join(choices or [self._text({}, f'TEXT_{name}', ())])})"

    def _text(self, schema: Schema, name: str, types: Sequence[str]) -> str:
        """Adds a terminal of a text as it is, which ends with the tag; returns the expression."""
        token = self.rules.token(_CLOSING)
        closing = "\n" if token is not None else "\n" + _CLOSING
        within = text_terminals(schema, closing, self.param) or [_ANY, f"/(.|\\n)*{in_pattern(closing)}/"]
        if others := "".join(sorted({_READ_AS[each] for each in types if each in _READ_AS})):
            within.append(rf"/([^\s\x1c-\x1f{others}](.|\n)*)?{in_pattern(closing)}/")
        terminal = self.rules.add(name, " & ".join(within))
        return f'{terminal} "\\n"' if token is None else f'{terminal} <[{token}]> "\\n"'

    def _json(self, schema: Any, name: str) -> str:
        definitions = {key: self.schema[key] for key in DEFINITIONS if key in self.schema}
        grammar = of_schema({**schema, **definitions}, JsonStyle(), self.param)
        return f"{self.rules.grammar(name, grammar)} {self.rules.text(f'{chr(10)}{_CLOSING}{chr(10)}')}"


_ANNOTATIONS = frozenset({"anyOf", "oneOf", "title", "description", "default", "examples", "$comment", "deprecated"})


def _has_more(schema: Schema) -> bool:
    return not schema.keys() <= _ANNOTATIONS or ("anyOf" in schema and "oneOf" in schema)


def _by_type(schema: Schema, parameters: Schema) -> list[dict[str, Any]]:
    """Returns a schema once for each type of its values; as it is where it names none."""
    types, values = types_of(schema, parameters), values_of(schema)
    if not types:
        return [dict(schema)]
    found = []
    for each in types:
        of_type = {**schema, "type": each}
        if values is not None:
            of_type.pop("const", None)
            of_type["enum"] = [value for value in values if _is_a(value, each)]
            if not of_type["enum"]:
                continue
        found.append(of_type)
    return found


def _is_a(value: Any, name: str) -> bool:
    found = type_of(value)
    return found == name or (found == "integer" and name == "number")
