"""Service level objectives: limits of times, which a good request keeps."""

import re
from dataclasses import dataclass

import numpy as np

from loadtest.bench.outcomes import Table
from loadtest.cannot_run import CannotRun

_TIME = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s)?")
_NAMES = ("ttft", "tpot", "itl", "e2e")
ATTAINMENT = 0.99  # the share of requests that has to keep an SLO, where nobody says another


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds, by name: see `read_slo`."""

    limits_s: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        return ", ".join(f"{name} {1e3 * limit_s:g} ms" for name, limit_s in self.limits_s)

    def kept(self, requests: Table) -> np.ndarray:
        """Says of each request whether it keeps all of them."""
        kept = np.ones(len(requests), dtype=bool)
        for name, _ in self.limits_s:
            kept &= ~self.missed(requests, name)
        return kept

    def missed(self, requests: Table, name: str) -> np.ndarray:
        """Says of each request whether it misses one of them. One without a second token has no tpot and no itl."""
        limit_s = dict(self.limits_s)[name]
        times: np.ndarray = getattr(requests, f"{name}_s")
        return times > limit_s  # of NaN false


def read_slo(text: str) -> Slo:
    """Reads `ttft=500ms,itl=50ms`: ttft, tpot, itl (the 99th percentile of a request's own) and e2e. Raises CannotRun.

    A number without a unit is in milliseconds.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, time = (piece.strip() for piece in part.partition("="))
        found = _TIME.fullmatch(time)
        if name not in _NAMES or found is None or name in limits or float(found[1]) == 0:
            raise CannotRun(f"--slo {text}: it is as ttft=500ms,itl=50ms, of {', '.join(_NAMES)}")
        limits[name] = float(found[1]) if found[2] == "s" else float(found[1]) / 1e3
    return Slo(tuple(limits.items()))
