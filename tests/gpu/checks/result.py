"""What a check of a kernel found."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One case: ‖out - reference‖ / ‖reference‖, or another error that its name says, and what it may be."""

    name: str
    error: float  # NaN: something was not written
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the error is within its bound; NaN never is."""
        return self.error <= self.bound
