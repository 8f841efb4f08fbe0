"""The parts of an answer that differ by vendor, whichever endpoint answers: how errors look, the request's id, and what
is left of a key's limits.
"""

from collections.abc import Sequence
from typing import Protocol

from services.gateway.api.errors import ApiError
from services.gateway.api.records.limits_left import LimitLeft, limit_headers


class Envelope(Protocol):
    """The form in which the clients of one vendor's API expect errors.

    id_headers: headers of every answer that hold the request's id.
    """

    @property
    def id_headers(self) -> tuple[str, ...]:
        """The names of those headers."""

    def limit_headers(self, limits: Sequence[LimitLeft]) -> Sequence[tuple[str, str]]:
        """The headers that say what is left of these limits."""

    def status(self, error: ApiError) -> int:
        """The status of an answer that is this error."""

    def body(self, error: ApiError, request_id: str) -> bytes:
        """The body of an answer that is this error."""

    def event(self, error: ApiError, request_id: str) -> bytes:
        """The last event of a stream that this error ended."""


class OpenAIEnvelope:
    """See Envelope. Paths that no API has answer in it too."""

    id_headers = ("x-request-id",)

    def limit_headers(self, limits: Sequence[LimitLeft]) -> Sequence[tuple[str, str]]:
        """See Envelope."""
        return limit_headers(limits)

    def status(self, error: ApiError) -> int:
        """See Envelope."""
        return error.status

    def body(self, error: ApiError, request_id: str) -> bytes:
        """See Envelope."""
        return error.envelope()

    def event(self, error: ApiError, request_id: str) -> bytes:
        """See Envelope."""
        return b"data: " + error.envelope() + b"\n\n"
