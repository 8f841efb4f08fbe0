"""JSON schemas drawn from a seed: nested, and of every kind whose answers end."""

import random
from typing import Any


def draw(seed: int) -> dict[str, Any]:
    """A schema of an object."""
    return _object(random.Random(seed), depth=2)


def _any(chance: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _choice, _constant, _pattern, _simple]
    return chance.choice([*kinds, *([_object, _array, _either, _map] if depth else [])])(chance, depth - 1)


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(["name", "größe", "a b", 'x"y', "list", "id", "0"], chance.randint(1, 4))
    properties = {name: _any(chance, depth) for name in names}
    required = [name for name in names if chance.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 2)
    return {"type": "array", "items": _any(chance, depth), "minItems": least, "maxItems": least + chance.randint(0, 2)}


def _either(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(chance, depth) for _ in range(chance.randint(2, 3))]}


def _map(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": _any(chance, 0), "maxProperties": 0}


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 5)}


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(-50, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 5000)}


def _choice(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": chance.sample(["red", "grün", 3, -1.5, None, True, 'a"b', ["x"], {"k": 1}], chance.randint(1, 4))}


def _constant(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"const": chance.choice([None, False, 12, "日本", []])}


def _pattern(chance: random.Random, depth: int) -> dict[str, Any]:
    known = [{"pattern": "^[A-Z]{2}-[0-9]{1,4}$"}, {"format": "date"}, {"format": "uuid"}, {"format": "ipv4"}]
    return {"type": "string", **chance.choice(known)}


def _simple(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": chance.choice(["boolean", "null"])}
