"""What is known of one client request, for its log line and the metrics, whichever API it came by."""

from dataclasses import dataclass, field
from time import monotonic

import structlog

from services.gateway.metrics import GatewayMetrics

log = structlog.get_logger()


@dataclass(slots=True)
class RequestRecord:
    """Times are in seconds. status: HTTP's number, or the name of gRPC's code."""

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
        """Counts the request; one that generates gets its log line."""
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
