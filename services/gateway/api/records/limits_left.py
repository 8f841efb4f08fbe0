"""The rest of a key's limits, as answers say it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LimitLeft:
    """The rest of one limit. reset_s: until all of it is there again, in seconds."""

    unit: Literal["requests", "tokens"]
    limit: int
    remaining: int
    reset_s: float


LIMIT_HEADERS = tuple(  # by vendor: OpenAI, Anthropic
    name.format(what=what, unit=unit)
    for name in ("x-ratelimit-{what}-{unit}", "anthropic-ratelimit-{unit}-{what}")
    for unit in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)


def limit_headers(limits: Sequence[LimitLeft]) -> list[tuple[str, str]]:
    """Returns the headers that say what is left, with OpenAI's names and forms."""
    found: list[tuple[str, str]] = []
    for left in limits:
        shown = (("limit", str(left.limit)), ("remaining", str(left.remaining)), ("reset", duration(left.reset_s)))
        found += [(f"x-ratelimit-{what}-{left.unit}", value) for what, value in shown]
    return found


def duration(seconds: float) -> str:
    """Returns a time as OpenAI writes it: `20ms`, `1s`, `6m0s`, `1h0m0s`; rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, whole = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{whole}s"
