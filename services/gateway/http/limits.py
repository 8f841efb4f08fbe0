"""The limits of requests over HTTP."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a client's request."""

    request_timeout_s: float
    ttft_slo_s: float | None = None
    max_body_bytes: int = 8 << 20
    strict_fields: bool = False  # fields that nobody knows are refused, and not ignored
