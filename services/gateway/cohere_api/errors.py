"""Errors in Cohere's form, and the names that its clients know fields by."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import orjson

from services.gateway.api.errors import ApiError
from services.gateway.http.envelope import OpenAIEnvelope

# Chats' names of fields, and those of Cohere's requests, where they differ. Messages and tools have the same numbers in
# both.
CHAT_NAMES = {
    "chat_template_kwargs": "thinking",
    "reasoning_effort": "thinking",
    "response_format": "response_format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.token_budget",
    "top_k": "k",
    "top_p": "p",
}


class CohereEnvelope(OpenAIEnvelope):
    """The envelope of Cohere's API, which names no headers for limits and for a request's id: these are OpenAI's."""

    def body(self, error: ApiError, request_id: str) -> bytes:
        """See Envelope."""
        return orjson.dumps({"id": request_id, "message": _words(error)})

    def event(self, error: ApiError, request_id: str) -> bytes:
        """See Envelope."""
        delta = {"error": _words(error), "finish_reason": "ERROR"}
        return event("message-end", {"id": request_id, "delta": delta})


def event(kind: str, fields: Mapping[str, object]) -> bytes:
    """Returns an event of a stream."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def _words(error: ApiError) -> str:
    """The message, which names the field at fault."""
    if error.param is None or error.param in error.message:
        return error.message
    return f"{error.param}: {error.message}"


@contextmanager
def in_words_of_cohere(names: Mapping[str, str]) -> Iterator[None]:
    """Gives errors of the `with` block the names of Cohere's fields. names: by those of the request that runs."""
    try:
        yield
    except ApiError as error:
        if error.param is None or (own := own_name(error.param, names)) == error.param:
            raise
        message = error.message.replace(f"'{error.param}'", f"'{own}'")
        raise replace(error, param=own, message=message) from error


def own_name(param: str, names: Mapping[str, str]) -> str:
    """Returns the name in Cohere's request of a field of the request that runs, which is a path."""
    return names.get(re.split(r"\W", param, maxsplit=1)[0], param)
