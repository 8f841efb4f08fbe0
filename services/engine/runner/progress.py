"""Progress of a load, for a person who waits for it."""

from typing import Protocol

WEIGHTS, KERNELS = "reading weights", "preparing kernels"  # stages; kernels are compiled at the first start


class Progress(Protocol):
    """Hears how far the load of a model is."""

    def stage(self, name: str, num_bytes: int | None = None) -> None:
        """A stage begins, and the one before it is over. num_bytes: as many will come; None: it has none."""

    def advance(self, num_bytes: int) -> None:
        """Bytes of the stage arrived: so many more."""


class Untold:
    """`Progress` that nobody looks at."""

    def stage(self, name: str, num_bytes: int | None = None) -> None:
        """See Progress."""

    def advance(self, num_bytes: int) -> None:
        """See Progress."""
