"""Figures as people read them: times, bytes, shares; "-" for what is not known."""

from datetime import datetime

UNKNOWN = "-"
_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")


def count(number: int | None) -> str:
    """Returns a number with its thousands apart."""
    return UNKNOWN if number is None else f"{number:,}"


def milliseconds(ms: float | None) -> str:
    """Returns a time in milliseconds, with one digit below ten."""
    return UNKNOWN if ms is None else f"{ms:,.1f}" if ms < 10 else f"{ms:,.0f}"


def share(value: float | None) -> str:
    """Returns a share as per cent."""
    return UNKNOWN if value is None else f"{value:.0%}"


def rate(value: float | None) -> str:
    """Returns a number of things each second."""
    return UNKNOWN if value is None else f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


def size(num_bytes: float) -> str:
    """Returns bytes in the unit of a thousand that fits."""
    for unit in _BYTES:
        if num_bytes < 1000 or unit == _BYTES[-1]:
            break
        num_bytes /= 1000
    return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"


def age(seconds: float | None) -> str:
    """Returns a time in its two largest units: `5s`, `3m20s`, `2h5m`, `4d3h`."""
    if seconds is None:
        return UNKNOWN
    whole = max(0, int(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours}h"
    return f"{hours}h{minutes}m" if hours else f"{minutes}m{rest}s" if minutes else f"{rest}s"


def clock(at: float) -> str:
    """Returns the local time of unix seconds."""
    return datetime.fromtimestamp(at).strftime("%H:%M:%S")


def printable(text: str) -> str:
    """Returns a text without what would move a terminal's cursor: parts of it are other programs' words."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "\ufffd" for each in text)
