"""The wait before a child that died is started again."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Waits double with every short life, up to a limit; a long life starts over."""

    first_s: float = 0.2
    factor: float = 2.0
    longest_s: float = 30.0
    long_life_s: float = 60.0

    def delay_s(self, previous_s: float | None, lifetime_s: float) -> float:
        """The wait after a life of `lifetime_s`, which itself had waited `previous_s` (None: it was the first)."""
        if previous_s is None or lifetime_s >= self.long_life_s:
            return self.first_s
        return min(previous_s * self.factor, self.longest_s)
