"""The record of one client request, for its log line and the metrics, whichever API it came by."""

import re
import secrets
from dataclasses import dataclass, field
from time import monotonic

import structlog

from services.gateway.metrics import GatewayMetrics

log = structlog.get_logger()

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=~-]{1,128}")


def sane_or_new_id(request_id: str) -> str:
    """Returns the id that a client gave its request where that is a sane one, else a new id."""
    return request_id if _REQUEST_ID.fullmatch(request_id) else secrets.token_hex(16)


@dataclass(slots=True)
class RequestRecord:
    """Figures of one request. Times are in seconds. status: HTTP's number, or the name of gRPC's code."""

    endpoint: str = "other"
    generates: bool = False
    status: int | str = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    finish_reason: str | None = None
    ttft_s: float | None = None
    arrived: float = field(default_factory=monotonic)

    def note_end(self, metrics: GatewayMetrics) -> None:
        """Counts the request, and logs it if it generates."""
        metrics.requests.labels(self.endpoint, str(self.status)).inc()
        if not self.generates:
            return
        log.info(
            "request",
            endpoint=self.endpoint,
            status=self.status,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            finish_reason=self.finish_reason,
            ttft_s=None if self.ttft_s is None else round(self.ttft_s, 6),
            duration_s=round(monotonic() - self.arrived, 6),
        )
