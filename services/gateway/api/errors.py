"""The errors that clients get: a status, and the envelope that OpenAI clients read.

Messages name fields of the request, and never a class, a path or a traceback.
"""

from dataclasses import dataclass, field

import orjson

from services.gateway.api.generation import (
    Expired,
    GenerationError,
    Overloaded,
    Stopping,
    TooLarge,
    Unavailable,
    Unsupported,
)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
OVERLOADED = "server_overloaded"  # a code
TOO_LONG = "context_length_exceeded"  # too


@dataclass(eq=False)
class ApiError(Exception):
    """An error as a client gets it.

    param: the field at fault, as a path (`messages[0].role`). code: OpenAI's, where it has one.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    type: str = INVALID_REQUEST
    headers: dict[str, str] = field(default_factory=dict)

    def envelope(self) -> bytes:
        """The body: `{"error": {message, type, param, code}}`."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400: the request is wrong."""
    return ApiError(400, message, param, code)


def unsupported(param: str, what: str = "") -> ApiError:
    """400: the request is right, but Baton does not support what it asks for."""
    return invalid(what or f"'{param}' is not supported by this server.", param, "unsupported_parameter")


def internal_error() -> ApiError:
    """500, without the reason."""
    return ApiError(500, "The server failed to answer this request.", code="internal_error", type=SERVER_ERROR)


def unavailable(message: str, retry_after_s: int) -> ApiError:
    """503, with the time until another try is worth while."""
    headers = {"retry-after": str(retry_after_s)}
    return ApiError(503, message, code="service_unavailable", type=SERVER_ERROR, headers=headers)


def from_generation_error(error: GenerationError, prompt_param: str) -> ApiError:
    """Translates the error that ended a request. `prompt_param`: the field that the prompt is made of."""
    match error:
        case Overloaded(retry_after_s=retry_after_s):
            message = "The server has more requests than it can answer in time. Try again later."
            headers = {"retry-after": str(retry_after_s)}
            return ApiError(429, message, code=OVERLOADED, type=SERVER_ERROR, headers=headers)
        case Stopping(retry_after_s=retry_after_s):
            return unavailable("The server is restarting. Try again.", retry_after_s)
        case Unavailable(retry_after_s=retry_after_s):
            return unavailable("No worker can take this request now. Try again later.", retry_after_s)
        case TooLarge():
            message = "This request needs more KV memory than any worker has. Shorten the prompt or lower max_tokens."
            return invalid(message, prompt_param, TOO_LONG)
        case Unsupported(restricted=True):
            names = "its form, 'allowed_token_ids', 'logit_bias', 'bad_words' and 'min_tokens'"
            return invalid(f"The answer cannot go on: {names} exclude each other.", None, "no_token_left")
        case Unsupported(asked=asked):
            message = f"The workers of this server do not support {asked or 'what this request asks for'}."
            headers = {"x-should-retry": "false"}  # the official clients try again at any status from 500 on
            return ApiError(501, message, code="unsupported_request", type=SERVER_ERROR, headers=headers)
        case Expired():
            message = "The request was not finished within its time limit."
            return ApiError(504, message, code="timeout", type=SERVER_ERROR)
        case _:
            return internal_error()
