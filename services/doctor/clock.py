"""Clocks of two processes: how far apart they are for certain, though the answer took its time."""

from services.doctor.finding import Finding, ok, warning

MAX_SKEW_S = 1.0


def certain_skew_s(told: tuple[float, float], here: tuple[float, float]) -> float:
    """Returns the seconds by which two clocks differ at least; 0 where they may agree.

    told: earliest and latest time that the other clock may have had; here: this clock's before and after the question.
    """
    return max(told[0] - here[1], here[0] - told[1], 0.0)


def check_clock(told: tuple[float, float], here: tuple[float, float]) -> Finding:
    """Compares a clock with this machine's, as `certain_skew_s` does."""
    skew = certain_skew_s(told, here)
    if skew > MAX_SKEW_S:
        direction = "ahead of" if told[0] > here[1] else "behind"
        return warning(
            "clock",
            f"at least {skew:.1f} s {direction} this machine's",
            "let both take the time from NTP: certificates, responses and log lines go by it",
        )
    return ok("clock", "agrees with this machine's")
