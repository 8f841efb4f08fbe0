"""The description of a route: what it accepts and answers. /openapi.json is made of these."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from services.gateway.api.requests.strict import Strict
from services.gateway.api.requests.validation import Neutral

JSON = "application/json"
BINARY = "application/octet-stream"

READING = (400, 408, 413, 415, 431, 500)  # errors of every route that reads a body
TOKENIZING = (400, 404, 408, 413, 415, 429, 431, 500, 503)  # of one that also needs the model
GENERATING = (*TOKENIZING, 501, 504)  # of one that also generates

Schema = dict[str, Any]

_NO_BODIES: Mapping[type[Strict], Neutral] = {}
_NO_QUERY: Mapping[str, Schema] = {}


class Described(BaseModel):
    """The base of answers as they are described: an object that has no other fields.

    Answers are written as plain JSON, for speed; tests hold what is written to these models. None of them is ever made.
    """

    model_config = ConfigDict(extra="forbid")


class ErrorDetails(Described):
    """The error. `param` is the field at fault, as a path. `requests`, `tokens`: what a key has a limit of."""

    message: str
    type: Literal["invalid_request_error", "server_error", "requests", "tokens"]
    param: str | None
    code: str | None


class ErrorAnswer(Described):
    """The envelope of every error of OpenAI's API, and of paths that no API has."""

    error: ErrorDetails


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The bodies that one route accepts, and its answers.

    bodies: the models of which a body has one, each with its fields that may only ask for nothing.
    query: the schemas of the fields of the path's query.
    answer: of 200; None where `media_type` is not JSON. error: the envelope of errors.
    chunk: the data of an event, of a route that can stream; last_data: that of the event that ends every stream.
    bytes_too: answers may be plain bytes, where the body asks for these.
    errors: the statuses beside 200. id_headers: those of every answer that hold the request's id.
    """

    summary: str
    bodies: Mapping[type[Strict], Neutral] = field(default_factory=lambda: _NO_BODIES)
    query: Mapping[str, Schema] = field(default_factory=lambda: _NO_QUERY)
    answer: type[BaseModel] | None = None
    error: type[BaseModel] = ErrorAnswer
    chunk: type[BaseModel] | None = None
    last_data: str | None = None
    media_type: str = JSON
    bytes_too: bool = False
    errors: tuple[int, ...] = (431, 500)
    id_headers: tuple[str, ...] = ("x-request-id",)


@dataclass(frozen=True, slots=True)
class DescribedRoute:
    """A path in Starlette's form, its method, and what is behind it."""

    path: str
    method: str
    operation: Operation
