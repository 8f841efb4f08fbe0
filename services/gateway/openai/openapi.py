"""/openapi.json: what every route accepts and answers, made of the models and tables that requests are checked by."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.api.request_record import IGNORED_FIELDS
from services.gateway.api.strict import Strict
from services.gateway.api.terms import TTFT_SLO_HEADER
from services.gateway.api.validation import INTERNAL_FIELDS, Neutral
from services.gateway.openai.answers import ErrorAnswer

JSON = "application/json"
EVENTS = "text/event-stream"

READING = (400, 408, 413, 415, 431, 500)  # errors of every route that reads a body
TOKENIZING = (400, 404, 408, 413, 415, 431, 500, 503)  # of one that also needs the model
GENERATING = (*TOKENIZING, 429, 504)  # of one that also generates

Schema = dict[str, Any]

_REF = "#/components/schemas/{model}"
_ERROR = {"description": "What was wrong.", "content": {JSON: {"schema": {"$ref": _REF.format(model="ErrorAnswer")}}}}
_NAME = re.compile(re.escape(_REF.format(model="")) + r"(\w+)")
_PATH_PARAMETER = re.compile(r"{(\w+)(?::path)?}")
_HEADERS: Schema = {
    "x-request-id": {"schema": {"type": "string"}, "description": "The client's, or a new one.", "required": True},
    IGNORED_FIELDS: {"schema": {"type": "string"}, "description": "Fields of the request that nothing acts on."},
}
_SLO: Schema = {
    "name": TTFT_SLO_HEADER,
    "in": "header",
    "description": "Milliseconds in which the first token must be expected, else the answer is 429.",
    "schema": {"type": "string", "pattern": "^[0-9]{0,9}$"},
}
_NO_BODIES: Mapping[type[Strict], Neutral] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The bodies that one route accepts, and its answers.

    bodies: the models of which a body has one, each with its fields that may only ask for nothing.
    answer: of 200; None where `media_type` is not JSON. chunk: the data of an event, of a route that can stream.
    errors: the statuses beside 200.
    """

    summary: str
    bodies: Mapping[type[Strict], Neutral] = field(default_factory=lambda: _NO_BODIES)
    answer: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None
    media_type: str = JSON
    errors: tuple[int, ...] = (431, 500)


@dataclass(frozen=True, slots=True)
class DescribedRoute:
    """A path in Starlette's form, its method, and what is behind it."""

    path: str
    method: str
    operation: Operation


def describe_api(routes: Sequence[DescribedRoute], max_body_bytes: int, strict_fields: bool) -> Schema:
    """Returns the document, OpenAPI 3.1. strict_fields: a request's fields that nobody knows are refused."""
    schemas = _Schemas([route.operation for route in routes], strict_fields)
    paths: Schema = {}
    for route in routes:
        path = _PATH_PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": version("baton-serve"),
            "description": f"A body has at most {max_body_bytes} bytes. null stands for an optional field's default.",
        },
        "paths": paths,
        "components": {"schemas": dict(sorted(schemas.by_name.items()))},
    }


class _Schemas:
    """The schemas of all models of some operations. Models of one name get longer names."""

    def __init__(self, operations: Sequence[Operation], strict_fields: bool) -> None:
        bodies = {body: neutral for operation in operations for body, neutral in operation.bodies.items()}
        answers = {kind for operation in operations for kind in (operation.answer, operation.chunk) if kind is not None}
        kinds: list[type[BaseModel]] = [*bodies, *sorted(answers, key=lambda kind: kind.__name__), ErrorAnswer]
        self._refs, defined = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
        self.by_name: Schema = defined["$defs"]
        for body, neutral in bodies.items():
            schema = self.by_name[self.name(body)]
            schema["properties"] = {**_neutral_fields(neutral, body), **schema["properties"]}
            if strict_fields:
                self._close(self.name(body), set())

    def ref(self, kind: type[BaseModel]) -> Schema:
        """A reference to a model's schema."""
        return self._refs[kind, "validation"]

    def name(self, kind: type[BaseModel]) -> str:
        """The name of a model's schema."""
        return str(self.ref(kind)["$ref"].rpartition("/")[2])

    def _close(self, name: str, closed: set[str]) -> None:
        """Lets no unknown fields into a body, nor into the objects in it."""
        closed.add(name)
        if self.by_name[name].get("additionalProperties") is True:
            self.by_name[name]["additionalProperties"] = False
        for inner in set(_NAME.findall(json.dumps(self.by_name[name]))) - closed:
            self._close(inner, closed)


def _operation(route: DescribedRoute, schemas: _Schemas) -> Schema:
    operation = route.operation
    described: Schema = {
        "summary": operation.summary,
        "operationId": f"{route.method.lower()} {route.path}",
        "parameters": list(_parameters(route)),
        "responses": {
            "200": _answer(operation, schemas),
            **{str(status): {**_ERROR, "headers": _HEADERS} for status in sorted(operation.errors)},
        },
    }
    if operation.bodies:
        content = {JSON: {"schema": _one_of([schemas.ref(body) for body in operation.bodies])}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _parameters(route: DescribedRoute) -> Iterator[Schema]:
    for name in _PATH_PARAMETER.findall(route.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    if 429 in route.operation.errors:
        yield _SLO


def _answer(operation: Operation, schemas: _Schemas) -> Schema:
    content: Schema = {operation.media_type: {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = {operation.media_type: {"schema": schemas.ref(operation.answer)}}
    if operation.chunk is not None:
        words = f"Events whose data is a {schemas.name(operation.chunk)} each, and [DONE] at the end."
        content[EVENTS] = {"schema": {"type": "string", "description": words}}
    return {"description": "The answer.", "headers": _HEADERS, "content": content}


def _one_of(refs: Sequence[Schema]) -> Schema:
    return refs[0] if len(refs) == 1 else {"anyOf": [*refs]}


def _neutral_fields(neutral: Neutral, body: type[Strict]) -> Schema:
    """Fields that are known and not acted on, with the only values that they may have."""
    fields: dict[str, tuple[object, ...]] = dict.fromkeys(INTERNAL_FIELDS if neutral else (), ())
    fields |= {name: values for name, values in neutral.items() if name not in body.model_fields}
    words = "Not supported: it may only have a value that asks for nothing."
    return {name: {"enum": [*_distinct(values), None], "description": words} for name, values in fields.items()}


def _distinct(values: Sequence[object]) -> list[object]:
    """JSON has one number for 1 and 1.0."""
    found: list[object] = []
    for value in values:
        if not any(type(value) in (int, float) and type(other) in (int, float) and value == other for other in found):
            found.append(value)
    return found
