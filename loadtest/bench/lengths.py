"""Lengths of prompts and answers, in tokens: one, any between two, or normally distributed."""

import re
from dataclasses import dataclass

import numpy as np

from loadtest.cannot_run import CannotRun

_FORMS = re.compile(r"(?P<low>\d+)(?:-(?P<high>\d+)|~(?P<deviation>\d+(?:\.\d+)?))?")
_LONGEST = 10_000_000
_FURTHEST = 4  # deviations from the mean: what is further away is drawn in


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths from `shortest` to `longest`; `deviation` 0: each is as likely as the other."""

    shortest: int
    longest: int
    deviation: float = 0.0

    @classmethod
    def fixed(cls, tokens: int) -> "Lengths":
        """One length."""
        return cls(tokens, tokens)

    @property
    def mean(self) -> float:
        """The middle of both ends."""
        return (self.shortest + self.longest) / 2

    def draw(self, random: np.random.Generator) -> int:
        """Draws one of them."""
        if self.shortest == self.longest:
            return self.shortest
        if not self.deviation:
            return int(random.integers(self.shortest, self.longest + 1))
        return min(max(round(random.normal(self.mean, self.deviation)), self.shortest), self.longest)

    def __str__(self) -> str:
        if self.shortest == self.longest:
            return str(self.shortest)
        return f"{self.mean:g}~{self.deviation:g}" if self.deviation else f"{self.shortest}-{self.longest}"


def read_lengths(text: str, flag: str) -> Lengths:
    """Reads `256`, `100-400` or `256~64`. Raises CannotRun, which names the flag.

    Of a normal distribution what is under 1, or more than four deviations away, counts as its nearest end.
    """
    found = _FORMS.fullmatch(text.strip())
    if found is None:
        raise CannotRun(f"{flag} {text}: a length is a number, two as 100-400, or a mean and a deviation as 256~64")
    low = int(found["low"])
    if found["deviation"] is not None:
        lengths = _normal(low, float(found["deviation"]))
    else:
        lengths = Lengths(low, low if found["high"] is None else int(found["high"]))
    if not 1 <= lengths.shortest <= lengths.longest <= _LONGEST:
        raise CannotRun(f"{flag} {text}: lengths are at least 1, and the second is no smaller than the first")
    return lengths


def _normal(mean: int, deviation: float) -> Lengths:
    """Lengths around a mean, as far above it as below."""
    reach = min(round(_FURTHEST * deviation), mean - 1)
    return Lengths(mean - reach, mean + reach, deviation if reach > 0 else 0.0)
