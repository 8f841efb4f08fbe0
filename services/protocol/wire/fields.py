"""Fields that a protobuf message and its dataclass share."""

from operator import attrgetter
from typing import Any


class SharedFields:
    """A group of two or more fields that have one name and one value on both sides, and are copied either way.

    For messages that are seldom sent. A frame names its fields twice: a step has one for each gateway, and plain
    keyword arguments cost two thirds of what this does.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._values = attrgetter(*names)

    def of(self, message: object) -> dict[str, Any]:
        """Returns the fields by name, as keyword arguments for the other side."""
        return dict(zip(self._names, self._values(message), strict=True))
