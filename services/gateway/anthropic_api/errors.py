"""Errors in the words of the Messages API: its envelope, its headers of limits, and the names that its clients know
fields by.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import orjson

from services.gateway.anthropic_api.request import CountRequest
from services.gateway.anthropic_api.tools import Tool
from services.gateway.api.errors import OVERLOADED, TOO_LONG, ApiError
from services.gateway.api.records.limits_left import LimitLeft

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
STATUS_OVERLOADED = 529
_TOO_LONG = "prompt is too long"  # the words by which clients know that they have to leave earlier turns out
_THREAD = "thread"
_NUMBER = re.compile(r"\[(\d+)\]")
_UP_S = 0.999999  # what makes cutting a second's fraction off rounding up
# Chats' name of a field, and its name here, where they differ. A path in `messages` is left out: the messages of the
# chat are not numbered as those of the request are.
_NAMES = {
    "chat_template_kwargs": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "user": "metadata.user_id",
}


class MessagesEnvelope:
    """See Envelope."""

    id_headers = ("request-id", "x-request-id")

    def limit_headers(self, limits: Sequence[LimitLeft]) -> Sequence[tuple[str, str]]:
        """See Envelope. A reset is a moment, as RFC 3339 writes it, in whole seconds."""
        found: list[tuple[str, str]] = []
        for left in limits:
            reset = datetime.now(UTC) + timedelta(seconds=left.reset_s + _UP_S)
            written = reset.strftime("%Y-%m-%dT%H:%M:%SZ")
            shown = (("limit", left.limit), ("remaining", left.remaining), ("reset", written))
            found += [(f"anthropic-ratelimit-{left.unit}-{what}", str(value)) for what, value in shown]
        return found

    def status(self, error: ApiError) -> int:
        """See Envelope. 429 is for limits of one client, 529 for a server that has too much to do or no worker."""
        return STATUS_OVERLOADED if error.code == OVERLOADED or error.status == 503 else error.status

    def body(self, error: ApiError, request_id: str) -> bytes:
        """See Envelope."""
        return orjson.dumps(self._values(error, request_id))

    def event(self, error: ApiError, request_id: str) -> bytes:
        """See Envelope."""
        return b"event: error\ndata: " + self.body(error, request_id) + b"\n\n"

    def _values(self, error: ApiError, request_id: str) -> dict[str, Any]:
        message = error.message if error.param is None else f"{error.param}: {error.message}"
        described: dict[str, Any] = {"type": _type(self.status(error)), "message": message}
        if error.param == _THREAD:  # by this the official clients know that they have to send the whole conversation
            described["details"] = {"error_code": "thread_unsupported_request", "unsupported": [_THREAD]}
        return {"type": "error", "error": described, "request_id": request_id}


def _type(status: int) -> str:
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


@contextmanager
def in_words_of_messages(request: CountRequest) -> Iterator[None]:
    """Gives errors of the chat that a request became the names of the request's own fields."""
    try:
        yield
    except ApiError as error:
        if error.param is None:
            raise
        own = own_name(error.param, request)
        message = error.message.replace(f"'{error.param}'", f"'{own}'")
        if error.code == TOO_LONG:
            message = f"{_TOO_LONG}: {message}"
        raise replace(error, param=own, message=message) from error


def own_name(param: str, request: CountRequest) -> str:
    """Returns the name in a request of a field of its chat, which is a path: `tools[0].function.name`."""
    if param == "reasoning_effort":
        return request.effort_field
    root = re.split(r"\W", param, maxsplit=1)[0]
    if root == "messages":
        return root
    if root == "tools":
        own = param.replace(".function.parameters", ".input_schema").replace(".function", "")
        return _NUMBER.sub(partial(_own_number, request), own, count=1)
    return _NAMES.get(root) or param


def _own_number(request: CountRequest, found: re.Match[str]) -> str:
    """Returns the number of a tool of the chat, among which there are no vendor's, in the request."""
    own = [number for number, tool in enumerate(request.tools or ()) if isinstance(tool, Tool)]
    return f"[{own[int(found[1])]}]"
