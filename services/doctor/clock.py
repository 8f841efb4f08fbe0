"""Clocks of other processes, compared with this machine's."""

from services.doctor.finding import Finding, ok, warning
from services.protocol.clock import certain_lead_s

MAX_SKEW_S = 1.0


def check_clock(told: tuple[float, float], here: tuple[float, float]) -> Finding:
    """Compares a clock with this machine's, as `certain_lead_s` does."""
    return describe_lead("clock", certain_lead_s(told, here), "this machine's")


def describe_lead(name: str, lead_s: float, other: str) -> Finding:
    """Judges the seconds by which a clock is ahead of another one at least; below 0: behind it."""
    if abs(lead_s) > MAX_SKEW_S:
        direction = "ahead of" if lead_s > 0 else "behind"
        return warning(
            name,
            f"at least {abs(lead_s):.1f} s {direction} {other}",
            "let both take the time from NTP: certificates, responses and log lines go by it",
        )
    return ok(name, f"agrees with {other}")
