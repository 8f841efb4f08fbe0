"""/openapi.json: what every route accepts and answers, made of the models and tables that requests are checked by."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.api.records.request_record import IGNORED_FIELDS, TOOLS
from services.gateway.api.requests.hints import HINTS, LEFT_OUT
from services.gateway.api.requests.strict import Strict
from services.gateway.api.requests.validation import INTERNAL_FIELDS, Neutral
from services.gateway.api.terms import TTFT_SLO_HEADER
from services.gateway.http.operation import BINARY, JSON, DescribedRoute, ErrorAnswer, Operation, Schema
from services.gateway.openai.examples import BODIES, NAMES, TAG_WORDS, tag_of

EVENTS = "text/event-stream"

_REF = "#/components/schemas/{model}"
_NAME = re.compile(re.escape(_REF.format(model="")) + r"(\w+)")
_PATH_PARAMETER = re.compile(r"{(\w+)(:path)?}")
_ID: Schema = {"schema": {"type": "string"}, "description": "x-request-id as it came, or a new one.", "required": True}
_HEADERS: Schema = {
    IGNORED_FIELDS: {"schema": {"type": "string"}, "description": "Fields of the request that nothing acts on."},
    TOOLS: {
        "schema": {"const": "inserted"},
        "description": "The chat template knows no tools, and Baton shows them.",
    },
}
_HEAD_TOO_LARGE = 431  # answered before the path is read, in the envelope of no API
_KEY_ERRORS = 401, 403  # of a request whose key is unknown, or does not open the path
_KEYS: Schema = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key, where the server asks for one."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_SLO: Schema = {
    "name": TTFT_SLO_HEADER,
    "in": "header",
    "description": "Milliseconds in which the first token must be expected, else the answer is 429.",
    "schema": {"type": "string", "pattern": "^[0-9]{0,9}$"},
}


def describe_api(
    routes: Sequence[DescribedRoute],
    max_body_bytes: int,
    strict_fields: bool,
    open_paths: Collection[str] | None = None,
    model: str = "MODEL",
    root_path: str = "",
) -> Schema:
    """Returns the document, OpenAPI 3.1.

    strict_fields: a request's fields that nobody knows are refused. open_paths: those at which no key is asked for,
    unlike at all others; None: no key is asked for. model: the name for examples.
    root_path: the beginning of all paths.
    """
    if open_paths is not None:
        routes = [each if each.path in open_paths else _asking_for_keys(each) for each in routes]
    schemas = _Schemas([route.operation for route in routes], strict_fields)
    paths: Schema = {}
    for route in routes:
        path = _PATH_PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schemas, model)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": version("baton-serve"),
            "description": f"A body has at most {max_body_bytes} bytes. null stands for an optional field's default.",
        },
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "tags": [{"name": tag, "description": words} for tag, words in TAG_WORDS.items()],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.by_name.items())),
            "securitySchemes": _KEYS,
        },
    }


def _asking_for_keys(route: DescribedRoute) -> DescribedRoute:
    operation = route.operation
    return replace(route, operation=replace(operation, errors=(*operation.errors, *_KEY_ERRORS)))


class _Schemas:
    """The schemas of all models of some operations. Models of one name get longer names."""

    def __init__(self, operations: Sequence[Operation], strict_fields: bool) -> None:
        bodies = {body: neutral for operation in operations for body, neutral in operation.bodies.items()}
        answers = {kind for operation in operations for kind in _answers(operation) if kind is not None}
        answers.add(ErrorAnswer)
        self._refs, defined = _define((*bodies, *sorted(answers, key=lambda kind: kind.__name__)))
        self.by_name: Schema = {name: dict(schema) for name, schema in defined.items()}
        for body, neutral in bodies.items():
            schema = self.by_name[self.name(body)]
            schema["properties"] = {**_neutral_fields(neutral, body, strict_fields), **schema["properties"]}
            if strict_fields:
                self._close(self.name(body), set())

    def ref(self, kind: type[BaseModel]) -> Schema:
        """A reference to a model's schema."""
        return self._refs[kind]

    def name(self, kind: type[BaseModel]) -> str:
        """The name of a model's schema."""
        return str(self.ref(kind)["$ref"].rpartition("/")[2])

    def _close(self, name: str, closed: set[str]) -> None:
        """Lets no unknown fields into a body, nor into the objects in it, nor values that a hint does not take."""
        closed.add(name)
        schema = self.by_name[name]
        if schema.get("additionalProperties") is True:
            schema["additionalProperties"] = False
        if "properties" in schema:
            schema["properties"] = {field: _taken(values) for field, values in schema["properties"].items()}
        for inner in set(_NAME.findall(json.dumps(self.by_name[name]))) - closed:
            self._close(inner, closed)


@cache  # it takes a good part of a second, and a process may have several applications of the same models
def _define(kinds: tuple[type[BaseModel], ...]) -> tuple[Mapping[type[BaseModel], Schema], Mapping[str, Schema]]:
    """Returns a reference to each model's schema, and the schemas by name."""
    refs, defined = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    return {kind: refs[kind, "validation"] for kind in kinds}, defined["$defs"]


def _answers(operation: Operation) -> tuple[type[BaseModel] | None, ...]:
    return operation.answer, operation.chunk, operation.error


def _operation(route: DescribedRoute, schemas: _Schemas, model: str) -> Schema:
    operation = route.operation
    described: Schema = {
        "tags": [tag_of(route.path)],
        "summary": operation.summary,
        "operationId": f"{route.method.lower()} {route.path}",
        "parameters": list(_parameters(route, model)),
        "responses": {
            "200": _answer(operation, schemas),
            **{str(status): _error(status, operation, schemas) for status in sorted(operation.errors)},
        },
    }
    if _KEY_ERRORS[0] in operation.errors:
        described["security"] = [{name: []} for name in _KEYS]
    if operation.bodies:
        content: Schema = {JSON: {"schema": _one_of([schemas.ref(body) for body in operation.bodies])}}
        if route.path in BODIES:
            content[JSON]["example"] = BODIES[route.path]
        described["requestBody"] = {"required": True, "content": content}
    return described


def _parameters(route: DescribedRoute, model: str) -> Iterator[Schema]:
    for name, rest_of_path in _PATH_PARAMETER.findall(route.path):
        schema = {"type": "string", "minLength": 1} if rest_of_path else {"type": "string", "pattern": "^[^/]+$"}
        example = NAMES.get(name, model)
        yield {"name": name, "in": "path", "required": True, "schema": schema, "example": example}
    for name, schema in route.operation.query.items():
        yield {"name": name, "in": "query", "schema": schema}
    if {429, 504} <= set(route.operation.errors):
        yield _SLO


def _answer(operation: Operation, schemas: _Schemas) -> Schema:
    content: Schema = {operation.media_type: {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = {operation.media_type: {"schema": schemas.ref(operation.answer)}}
    if operation.bytes_too:
        content[BINARY] = {"schema": {"type": "string", "format": "binary"}}
    if operation.chunk is not None:
        words = f"Events whose data is a {schemas.name(operation.chunk)} each"
        words += f", and {operation.last_data} at the end." if operation.last_data else "."
        content[EVENTS] = {"schema": {"type": "string", "description": words}}
    return {"description": "The answer.", "headers": _headers(operation), "content": content}


def _error(status: int, operation: Operation, schemas: _Schemas) -> Schema:
    kind = ErrorAnswer if status == _HEAD_TOO_LARGE else operation.error
    content = {JSON: {"schema": schemas.ref(kind)}}
    return {"description": "What was wrong.", "headers": _headers(operation), "content": content}


def _headers(operation: Operation) -> Schema:
    return {**dict.fromkeys(operation.id_headers, _ID), **_HEADERS}


def _one_of(refs: Sequence[Schema]) -> Schema:
    return refs[0] if len(refs) == 1 else {"anyOf": [*refs]}


def _neutral_fields(neutral: Neutral, body: type[Strict], strict_fields: bool) -> Schema:
    """Fields that are known and not acted on, with the only values that they may have; hints may have any."""
    fields: dict[str, tuple[object, ...]] = dict.fromkeys(INTERNAL_FIELDS if neutral else (), ())
    fields |= {name: values for name, values in neutral.items() if name not in body.model_fields}
    words = "Not supported: it may only have a value that asks for nothing."
    only = {name: {"enum": [*_distinct(values), None], "description": words} for name, values in fields.items()}
    hints = () if strict_fields else fields.keys() & HINTS.keys()
    return only | {name: {"description": f"Ignored: {HINTS[name]}."} for name in hints}


def _taken(values: Schema) -> Schema:
    """Returns the schema of a field's values without those that are left out of a request."""
    if LEFT_OUT not in values.get("anyOf", ()):
        return values
    return {**values, "anyOf": [each for each in values["anyOf"] if each != LEFT_OUT]}


def _distinct(values: Sequence[object]) -> list[object]:
    """JSON has one number for 1 and 1.0."""
    found: list[object] = []
    for value in values:
        if not any(type(value) in (int, float) and type(other) in (int, float) and value == other for other in found):
            found.append(value)
    return found
