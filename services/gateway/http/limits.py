"""The limits of requests over HTTP."""

from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.api.caller import Caller
from services.gateway.api.requests.request_defaults import RequestDefaults
from services.gateway.api.terms import TTFT_SLO_HEADER, Terms, parse_ttft_slo

_NO_DEFAULTS = RequestDefaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a client's request, and what the server says where it does not."""

    request_timeout_s: float
    ttft_slo_s: float | None = None
    max_body_bytes: int = 8 << 20
    strict_fields: bool = False  # fields that nobody knows are refused, and not ignored
    defaults: RequestDefaults = _NO_DEFAULTS

    def terms(self, header: Callable[[str], str], caller: Caller) -> Terms:
        """Returns the terms of a request. header: the value of one of its headers, by name. Raises ApiError."""
        return Terms(self.request_timeout_s, parse_ttft_slo(header(TTFT_SLO_HEADER), self.ttft_slo_s), caller)
