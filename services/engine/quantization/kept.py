"""Forms in which a model's stored codes are kept in memory, for a person to read."""

from collections import Counter

from services.protocol.model_files.base import ModelError


class KeptForms:
    """Matrices that are stored as codes: how many are multiplied so, and how many had to be unpacked."""

    def __init__(self) -> None:
        self._kept: Counter[str] = Counter()
        self._unpacked: Counter[str] = Counter()

    def keep(self, form: str) -> None:
        """Counts a matrix that is multiplied as it is stored."""
        self._kept[form] += 1

    def unpack(self, form: str) -> None:
        """Counts a matrix that no kernel here multiplies, and that is kept in numbers."""
        self._unpacked[form] += 1

    def require(self, option: str) -> None:
        """Raises ModelError if nothing is multiplied as this option asks for."""
        if not self._kept:
            raise ModelError(f"{option}: no kernel here multiplies such weights, leave it out")

    def notices(self) -> tuple[str, ...]:
        """Returns what a person should hear of, one line for each form that was unpacked."""
        return tuple(
            f"{count} matrices stored as {form} are unpacked: no kernel here multiplies them so"
            for form, count in sorted(self._unpacked.items())
        )
