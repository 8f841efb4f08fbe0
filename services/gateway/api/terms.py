"""The terms on which a client's request is served: its time limit, the time to its first token, and whose it is."""

from dataclasses import dataclass

from services.gateway.api.caller import ANYBODY, Caller
from services.gateway.api.errors import invalid

TTFT_SLO_HEADER = "x-slo-ttft-ms"  # in HTTP and in gRPC's metadata; the name that llm-d gives it


@dataclass(frozen=True, slots=True)
class Terms:
    """Times are in seconds from now. ttft_slo_s: a request that cannot have its first token by then is refused."""

    timeout_s: float
    ttft_slo_s: float | None = None
    caller: Caller = ANYBODY

    @property
    def tenant(self) -> str:
        """The tenant of the caller."""
        return self.caller.tenant


def parse_ttft_slo(milliseconds: str, default_s: float | None) -> float | None:
    """The seconds of the header's text, `default_s` for an empty one. Raises ApiError."""
    if not milliseconds:
        return default_s
    if not milliseconds.isdecimal() or not milliseconds.isascii() or not 0 < len(milliseconds) < 10:
        raise invalid(f"'{TTFT_SLO_HEADER}' must be a whole number of milliseconds.", TTFT_SLO_HEADER)
    return int(milliseconds) / 1000
