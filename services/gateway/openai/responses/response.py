"""The response object: how it ended, and its JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from services.gateway.api.answers.choice import Usage
from services.gateway.api.errors import SERVER_ERROR, ApiError
from services.gateway.openai.responses.output import ItemStatus
from services.gateway.openai.responses.request import ResponsesRequest
from services.protocol.model_files.info import GenerationDefaults

_NOTHING_YET: dict[str, Any] = {"completed_at": None, "output": [], "usage": None}


class Status(StrEnum):
    """OpenAI's status of a response."""

    QUEUED = "queued"  # in the background, and without a token so far
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"


GOING_ON = (Status.QUEUED, Status.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a response. error: of one that failed."""

    status: Status
    error: ApiError | None = None

    @property
    def last_item(self) -> ItemStatus:
        """The status of the item that was growing."""
        return ItemStatus.COMPLETED if self.status is Status.COMPLETED else ItemStatus.INCOMPLETE

    @property
    def event(self) -> str:
        """The type of a stream's last event. OpenAI has none for cancelled responses, which are incomplete too."""
        return f"response.{Status.INCOMPLETE if self.status is Status.CANCELLED else self.status}"

    def as_json(self) -> dict[str, Any]:
        """Returns the fields of the response that say how it ended."""
        failed = None
        if self.error is not None:
            code = "rate_limit_exceeded" if self.error.status == 429 else "server_error"
            failed = {"code": code, "message": self.error.message}
        reason = {"reason": "max_output_tokens"} if self.status is Status.INCOMPLETE else None
        return {"status": self.status, "error": failed, "incomplete_details": reason}


def finished(finish_reason: str | None) -> Outcome:
    """The outcome of a choice that ended for this reason."""
    return Outcome(Status.INCOMPLETE if finish_reason == "length" else Status.COMPLETED)


def head(request: ResponsesRequest, about: dict[str, Any], defaults: GenerationDefaults) -> dict[str, Any]:
    """Returns the JSON values of a response that has just begun. `about`: its id, time, model and whether it is kept.

    What the request left open has the value that Baton uses.
    """
    text, reasoning = request.text, request.reasoning
    return {
        **about,
        "object": "response",
        **Outcome(Status.QUEUED if request.background else Status.IN_PROGRESS).as_json(),
        **_NOTHING_YET,
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "temperature": _first(request.temperature, defaults.temperature),
        "top_p": _first(request.top_p, defaults.top_p),
        "top_logprobs": request.top_logprobs or 0,
        "text": {"format": text.format.as_json() if text and text.format else {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "tools": orjson.Fragment(orjson.dumps([tool.model_dump() for tool in request.tools or ()])),
        "tool_choice": request.tool_choice.as_json() if request.tool_choice else "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "truncation": request.truncation or "disabled",
        "background": bool(request.background),
        "service_tier": "default",
        "metadata": request.metadata or {},
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
    }


def as_begun(response: Mapping[str, Any], status: Status) -> dict[str, Any]:
    """Returns the JSON values that a response had before its first item, with this status."""
    return {**response, **Outcome(status).as_json(), **_NOTHING_YET}


def as_failed(response: Mapping[str, Any], message: str) -> dict[str, Any]:
    """Returns the JSON values of a response that is lost. message: says why."""
    failure = ApiError(500, message, type=SERVER_ERROR)
    return {**response, **Outcome(Status.FAILED, failure).as_json(), **_NOTHING_YET}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Returns a response's usage."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _first(asked: float | None, default: float | None) -> float:
    if asked is not None:
        return asked
    return 1.0 if default is None else default
