"""The result of a kernel's check."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One case: ‖out - reference‖ / ‖reference‖, or another error that its name says, and the bound of the error."""

    name: str
    error: float  # NaN: something was not written
    bound: float

    @property
    def ok(self) -> bool:
        """True when the error is within its bound; NaN never is."""
        return self.error <= self.bound
