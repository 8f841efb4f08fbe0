"""Defaults of the server for requests, where they do not say otherwise."""

from dataclasses import dataclass

from services.gateway.api.requests.schema import Request, StreamOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """The defaults of chats and completions.

    clamps_tokens: see CommonRequest. include_usage: every stream ends with its usage. tokens_as_ids: logprobs name
    tokens by their ids.
    """

    clamps_tokens: bool = False
    include_usage: bool = False
    tokens_as_ids: bool = False

    def applied(self, request: Request) -> Request:
        """Returns a request with the defaults filled in."""
        filled: dict[str, object] = {}
        if self.include_usage and request.stream and not request.include_usage:
            options = request.stream_options or StreamOptions()
            filled["stream_options"] = options.model_copy(update={"include_usage": True})
        if self.tokens_as_ids and request.return_tokens_as_token_ids is None:
            filled["return_tokens_as_token_ids"] = True
        if not filled and not self.clamps_tokens:
            return request
        made = request.model_copy(update=filled)
        made._clamps_tokens = self.clamps_tokens
        return made
